"""The rules of `docs/design.md`, each taken out or turned around: what a test patches into the protocol."""

import numpy as np

from torch_ecrec.client import client as client_module
from torch_ecrec.client import reads
from torch_ecrec.durability import adoption, folding, rebuild, streams
from torch_ecrec.durability.parity import Parity
from torch_ecrec.layout import repair
from torch_ecrec.protocol import messages, step_rule
from torch_ecrec.records import delta_log, merge
from torch_ecrec.runtime.tensors import as_array
from torch_ecrec.server import apply, service, slot, snapshots
from torch_ecrec.transport.node import Node


def no_undo(patch):
    patch.setattr(folding.Folds, "undo_after", lambda self, source, cut: None)


def early_ack(patch):
    patch.setattr(step_rule.StepRule, "settled", property(lambda self: self.applied))


def no_fence(patch):
    patch.setattr(step_rule.StepRule, "is_current", lambda self, index, incarnation: True)


NEWEST = 1 << 20  # in a version vector, as if it were a slot: data members are to be read as they are now


def newest(patch, parity: bool):
    version_vector, on_fetch = repair.version_vector, Parity.on_fetch

    def vector(plan, folded_by):
        steps = version_vector(plan, folded_by)
        repairs_parity = plan.member not in plan.reads and plan.member >= len(plan.sources)
        return {**steps, NEWEST: 0} if steps is not None and repairs_parity == parity else steps

    def fetch(self, request, reply):
        if NEWEST in request.as_of and not request.parity:
            request.as_of = {self.held.index: self.held.rule.applied}
        on_fetch(self, request, reply)

    patch.setattr(rebuild.repair, "version_vector", vector)
    patch.setattr(Parity, "on_fetch", fetch)


def encode_newest(patch):
    newest(patch, parity=True)


def decode_newest(patch):
    newest(patch, parity=False)


def no_roll_forward(patch):
    """A parity is installed as of the steps it was read as of, though its holder has folded more since."""
    patch.setattr(rebuild._Repair, "_roll_forward", lambda self: [])


def stale_confirmation(patch):
    """Confirmations of replaced incarnations count: neither the rule nor the stream turns them away."""

    def on_confirmed(self, holder, incarnation, at):
        self.confirmed[holder] = max(self.confirmed[holder], at)

    def stop(self):
        self.attached = False
        self.under_way, self.attaching = {}, None

    def ask(self, index, make, done, *, bound_to=None, lost=None):
        return node_ask(self, index, make, done)

    node_ask = Node.ask
    patch.setattr(step_rule.StepRule, "on_confirmed", on_confirmed)
    patch.setattr(streams.FoldStream, "stop", stop)
    patch.setattr(Node, "ask", ask)


def snapshots_not_copied(patch):
    patch.setattr(snapshots.SnapshotStore, "copy_all", lambda self: None)


def snapshots_from_an_empty_holder(patch):
    """A new holder hands over its snapshots before it has got them itself."""
    on_fetch = snapshots.SnapshotStore.on_fetch

    def fetch(self, request, reply):
        lacks, self.lacks_all = self.lacks_all, False
        on_fetch(self, request, reply)
        self.lacks_all = lacks

    patch.setattr(snapshots.SnapshotStore, "on_fetch", fetch)


def fold_twice(patch):
    on_fold = folding.Folds.on_fold

    def fold(self, request, reply):
        rule = self.held.rule
        verdict = rule.judge_fold(request.source, request.source_incarnation, request.step)
        if verdict is step_rule.FoldVerdict.DUPLICATE:
            self._fold_in(request.source, [p.numpy() for p in request.positions], [d.numpy() for d in request.deltas])
        on_fold(self, request, reply)

    patch.setattr(folding.Folds, "on_fold", fold)


def fold_unordered(patch):
    """A fold that comes before its turn is folded at once, and the one it overtook is taken for a duplicate."""
    judge = step_rule.StepRule.judge_fold

    def eager(self, source, incarnation, at):
        verdict = judge(self, source, incarnation, at)
        if verdict is step_rule.FoldVerdict.EARLY:
            self.folded[source] = at - 1
            return step_rule.FoldVerdict.NEXT
        return verdict

    append = delta_log.DeltaLog.append

    def with_gaps(self, step, positions, deltas, *more):
        while self.last + 1 < step:
            append(self, self.last + 1, [p[:0] for p in positions], [d[:0] for d in deltas])
        append(self, step, positions, deltas, *more)

    patch.setattr(step_rule.StepRule, "judge_fold", eager)
    patch.setattr(delta_log.DeltaLog, "append", with_gaps)


def merge_as_they_come(patch):
    def merged(self, got):
        return [
            merge.merge([(push.positions[s].numpy(), as_array(push.gradients[s])) for push in got.values()])
            for s in range(len(self.held.shards))
        ]

    patch.setattr(apply.Applier, "_merge", merged)


def no_window(patch):
    patch.setattr(client_module.Client, "may_push", lambda self: True)


def ahead_not_sent_again(patch):
    """A push that was answered with rows, and is not acknowledged yet, is not sent to the next life of its slot."""

    def place(self, placement):
        newer = reads.SlotReads.place(self, placement)
        self.on_change()
        return newer

    patch.setattr(client_module.Client, "place", place)


def never_settled(patch):
    """Nobody asks for the acknowledgement of a push that was answered with rows."""
    patch.setattr(client_module.Client, "_settle", lambda self, slot: None)


def rows_acknowledge(patch):
    """An answer with rows counts as an acknowledgement of the step."""
    acknowledge = client_module.Client._acknowledge

    def all_of_it(self, slot, through):
        steps = [step for step, state in self.open.items() if slot in state.ran_ahead]
        acknowledge(self, slot, max([through, *steps]))

    patch.setattr(client_module.Client, "_acknowledge", all_of_it)


def forget_everything(patch):
    """The log ends at what is applied: nobody can be shown, or take back, an earlier step."""
    patch.setattr(step_rule.StepRule, "may_forget", lambda self: self.applied)


def forget_nothing(patch):
    patch.setattr(step_rule.StepRule, "may_forget", lambda self: 0)


def cut_again(patch):
    """A late copy of a cut is obeyed, although the new host has sent folds since."""
    on_cut = folding.Folds.on_cut

    def cut(self, request, reply):
        self.attached = {}
        on_cut(self, request, reply)

    patch.setattr(folding.Folds, "on_cut", cut)


def not_caught_up_counts(patch):
    """The cut is the minimum over all holders, also those that lack what was acknowledged before they came."""

    def choose(reports):
        return min((folded for folded, _ in reports if folded is not None), default=None)

    patch.setattr(adoption, "choose_cut", choose)


def rebuilt_too_early(patch):
    """A new holder calls itself rebuilt before it has caught up."""
    patch.setattr(step_rule.StepRule, "is_caught_up", lambda self, source: True)


def acknowledged_again(patch):
    """A push of a step acknowledged by an earlier incarnation waits to be applied again."""

    def is_acknowledged(self, at):
        return getattr(self, "cut", 0) < at <= self.acknowledged

    patch.setattr(step_rule.StepRule, "is_acknowledged", is_acknowledged)
    become_ready = slot.Slot.become_ready

    def ready(self, cut, floor, log):
        self.rule.cut = cut
        become_ready(self, cut, floor, log)

    patch.setattr(slot.Slot, "become_ready", ready)


def void_stores_count(patch):
    """A snapshot that a lost holder had stored counts for its new host, although that copied another's before."""
    patch.setattr(slot.Slot, "known_incarnations", lambda self: [])


# lost trainers


def no_era(patch):
    """Messages from before the trainers were lost count."""
    handle = service.Host._handle

    def any_era(self, request, reply):
        request.era = self.era
        handle(self, request, reply)

    patch.setattr(service.Host, "_handle", any_era)


def no_freeze(patch):
    """Servers go on until they know the step that they go back to."""
    patch.setattr(slot.Slot, "freeze", lambda self: self.tell_reach())
    patch.setattr(service, "TRAINERS_ONLY", ())


def records_not_undone(patch):
    go_back = slot.Slot.go_back

    def keep(self, to, *more):
        every = [np.arange(shard.data_rows) for shard in self.shards]
        held = [shard.gather(rows) for shard, rows in zip(self.shards, every, strict=True)]
        go_back(self, to, *more)
        for shard, rows, before in zip(self.shards, every, held, strict=True):
            shard.scatter_(rows, before)

    patch.setattr(slot.Slot, "go_back", keep)


def parities_not_undone(patch):
    patch.setattr(folding.Folds, "undo_all_after", lambda self, to: None)


def not_made_durable(patch):
    """Trainers start before the step that they start after is folded everywhere and its snapshot is on all holders."""

    def check_durable(self):
        if self.going_back_to is not None:
            self.going_back_to = None
            self.host.tell(messages.Durable(*self.life, self.host.era))

    patch.setattr(slot.Slot, "check_durable", check_durable)
    patch.setattr(snapshots.SnapshotStore, "_copy", lambda self: None)


def short_log(patch):
    """The log reaches back to what is settled, although the trainers may have to start before that."""
    patch.setattr(step_rule.StepRule, "may_forget", lambda self: self.settled)


def start_at_settled(patch):
    """A new holder gets the steps that are not settled, rather than all that may be undone."""
    on_attach = folding.Folds.on_attach

    def attach(self, request, reply):
        request.base = max(request.base, request.acknowledged)
        on_attach(self, request, reply)

    patch.setattr(folding.Folds, "on_attach", attach)
