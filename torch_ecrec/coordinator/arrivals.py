"""What follows when a member has come into the world."""

from __future__ import annotations

from torch_ecrec.coordinator.state import ClusterState


def enter(state: ClusterState, name: str, generation: int, now_s: float) -> None:
    """A member has joined the RPC world of a generation. Once all have, slots get the hosts that they waited for."""
    if state.world.on_entered(name, generation):
        state.suspicion.on_world(now_s)
        if not state.table.placed:
            state.table.place_all()
        state.table.place_waiting()
        state.table.moves.rebalance()
        state.form(now_s)
