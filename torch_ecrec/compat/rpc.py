"""The private names of torch.distributed.rpc, for `transport/rpc.py` alone.

`init_rpc`, the public way to an agent, goes through a process group and RPCs that wait without a limit when a member
dies. So the agent is made, and started, as `init_rpc` does it inside.
"""

from __future__ import annotations

from torch.distributed.autograd import _init as init_autograd  # type: ignore[attr-defined]
from torch.distributed.rpc import _is_current_rpc_agent_set as is_agent_set  # type: ignore[attr-defined]
from torch.distributed.rpc import _set_and_start_rpc_agent as start_agent  # type: ignore[attr-defined]

__all__ = ["init_autograd", "is_agent_set", "start_agent"]
