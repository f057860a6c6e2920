"""The oracle of `random_models.py`: TorchRec's unsharded modules with torch's autograd, and the optimizers' formulas.

It trains beside what was trained, step by step, from the same tables:

    looked up, lost   within float32 tolerance of the unsharded modules; bit for bit where sums have one order
    gradients         those pushed are autograd's, of the rows of the batches and of no others, likewise
    records           what the formulas make of what was pushed, summed in trainer order: bit for bit
    maps              TorchRec's own, given the ids of all trainers: bit for bit
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from formulas import stepped
from random_models import Batch, Model, Net, Optimized, _configs, batches_of, drawn, maps_of, name_of
from random_training import End, is_of_table, is_some, of_state, of_weights
from torch import Tensor
from torchrec import KeyedJaggedTensor
from virtual_trainers import Told

from torch_ecrec.nn.slices import DTYPES
from torch_ecrec.records.halves import numbers_of
from torch_ecrec.spec.job import JobSpec, OptimizerSpec

F32 = np.float32
ROUNDED = {"float32": 0.0, "float16": 8e-3, "bfloat16": 6e-2}  # sums of another order may be rounded to the next value


def expanded(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch in which each sample has bags of its own."""
    names, index = features.inverse_indices()
    of_key = features.to_dict()
    keys = list(features.keys())
    lengths, values, weights = [], [], []
    for key in keys:
        part = of_key[key]
        bags = part.values().split(part.lengths().tolist())
        of_bags = None if features.weights_or_none() is None else part.weights().split(part.lengths().tolist())
        for bag in index[names.index(key)].tolist():
            values.append(bags[bag])
            lengths.append(len(bags[bag]))
            weights += [] if of_bags is None else [of_bags[bag]]
    return KeyedJaggedTensor(
        keys, torch.cat(values), weights=torch.cat(weights) if weights else None, lengths=torch.tensor(lengths)
    )


class Values:
    """What was looked up, of some dtype."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def values(self) -> Tensor:
        return self._values


class Unsharded:
    """A model's training, by other means.

    Args:
        model, job: what was trained.
        ends: of the trainers; trainer 0's has all records.
        told: what the servers were told.
    """

    def __init__(self, model: Model, job: JobSpec, ends: dict[int, End], told: Told) -> None:
        self.model, self.job, self.ends, self.told = model, job, ends, told
        self.net = Net(model, plain=True)
        self.maps = {
            i: maps_of(part, _configs(part, i, plain=True)) for i, part in enumerate(model.parts) if part.managed
        }
        self.remapped: dict[tuple[int, int, int], KeyedJaggedTensor] = {}  # (part, ask, trainer)
        self.copies: dict[tuple[int, int], Any] = {}
        self.net.look_up = self._look_up  # type: ignore[method-assign]
        first = ends[0].first
        assert first is not None
        self.numbers = [numbers_of(r.numpy(), s.schema).copy() for r, s in zip(first, job.table_groups, strict=True)]
        self.trainer = 0
        self.batches = [batches_of(model, trainer) for trainer in range(model.trainers)]
        self.specs = {table.name: table for table in job.tables}
        self.compared = 0

    def check(self) -> None:
        """Raises AssertionError where anything is not as it must be."""
        self._check_first()
        self._load(0)
        for step in range(1, self.model.steps + 1):
            self._step(step)
            self._load(step)
        last = self.ends[0].last
        assert last is not None
        for table_group, numbers, records in zip(self.job.table_groups, self.numbers, last, strict=True):
            found = numbers_of(records.numpy(), table_group.schema)
            assert np.array_equal(found.view(np.uint32), numbers.view(np.uint32)), f"records of {table_group.tables}"
        for end in self.ends.values():
            self._check_maps(end)

    # tables -----------------------------------------------------------------------------------------

    def _place(self, part: int, table: int) -> tuple[int, slice]:
        name = name_of(self.model, part, table)
        table_group, first = self.job.place_of_table[name]
        return table_group, slice(first, first + self.specs[name].rows)

    def _tables(self) -> list[tuple[int, int, int, slice]]:
        return [(i, j, *self._place(i, j)) for i, part in enumerate(self.model.parts) for j in range(len(part.tables))]

    def _rounded(self, values: Tensor, table_group: int) -> np.ndarray:
        return values.to(DTYPES[self.job.table_groups[table_group].weights]).float().numpy()

    def _check_first(self) -> None:
        for i, j, table_group, rows in self._tables():
            part, table = self.model.parts[i], self.model.parts[i].tables[j]
            spec, wanted = self.specs[name_of(self.model, i, j)], table.optimized
            if wanted.kind == "default":
                given = self.model.given if part.of_sharder else None
                wanted = given or Optimized("sgd", 0.01)
            clip = self.model.clip if part.of_sharder else None
            right = OptimizerSpec(wanted.kind, wanted.lr, clip, **dict(wanted.fixed))
            assert spec.optimizer == right and spec.weights == table.dtype
            numbers = self.numbers[table_group][rows]
            assert not numbers[:, table.dim :].any(), "optimizer state is fresh"
            held = part.holds
            if table.start == "servers" and not part.managed:
                low, high = spec.low, spec.high
                assert held or (np.abs(numbers[:, : table.dim]) <= max(-low, high) * 1.01).all()
                continue
            if held and part.kind == "fused bags":
                continue  # FBGEMM's own
            module = torch.float16 if held and table.dtype != "float32" else DTYPES[table.dtype]
            weights = drawn(torch.empty(table.rows, table.dim, dtype=module), seed=100 * i + j)
            assert np.array_equal(numbers[:, : table.dim], self._rounded(weights.float(), table_group))

    def _load(self, step: int) -> None:
        for at, what in self.model.loads:
            if at != step:
                continue
            for i, j, table_group, rows in self._tables():
                numbers, dim = self.numbers[table_group][rows], self.job.table_groups[table_group].dim
                if what == "state":
                    numbers[:, dim:] = of_state(torch.from_numpy(numbers[:, dim:])).numpy()
                elif what != "some" or is_some(f"parts.{i}.t{j}.weight"):
                    dtype = DTYPES[self.job.table_groups[table_group].weights]
                    numbers[:, :dim] = of_weights(torch.from_numpy(numbers[:, :dim]).to(dtype)).float().numpy()

    # a step -----------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        batches = [each[step - 1] for each in self.batches]
        self._remap_and_copy(batches)
        named = {name: p for name, p in self.net.named_parameters() if not is_of_table(name)}
        dense = {name: named[name] for name in self.ends[0].dense}
        assert len(dense) == len(named), "the dense parameters"
        traces = [self.ends[trainer].trace[step - 1] for trainer in range(self.model.trainers)]
        for trainer, trace in enumerate(traces):
            assert list(dense) == list(self.ends[trainer].dense)
            assert all(map(torch.equal, trace[1], traces[0][1])), "all trainers have one dense model"
        self._set_dense(dense, traces[0][1])
        total = torch.zeros(())
        for self.trainer, (batch, trace) in enumerate(zip(batches, traces, strict=True)):
            loss, seen = self.net(batch)
            for number, (mine, theirs) in enumerate(zip(trace[0], seen, strict=True)):  # the loss first
                self._close(mine, theirs, f"lookup {number} of step {step}, trainer {self.trainer}")
            total = total + (loss if self.model.trainers == 1 else loss / self.model.trainers)
        total.backward()
        for name, mine in zip(dense, traces[0][2], strict=True):
            grad = dense[name].grad
            theirs = torch.zeros_like(mine) if grad is None else grad
            self._close(mine, theirs, f"gradient of {name}, step {step}", 1e-4)
        self._push(step, batches)
        after = step == self.model.steps
        self._set_dense(dense, list(self.ends[0].dense.values()) if after else self.ends[0].trace[step][1])
        self._evaluate(step, traces, batches)

    @staticmethod
    def _set_dense(dense: dict[str, torch.nn.Parameter], values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(dense.values(), values, strict=True):
                parameter.copy_(value)
                parameter.grad = None

    def _close(self, mine: Tensor, theirs: Tensor, what: str, tolerance: float = 1e-5) -> None:
        self.compared += 1
        theirs = theirs.detach()
        assert mine.dtype == theirs.dtype, what
        if self.model.exact or not mine.is_floating_point():
            assert torch.equal(mine, theirs), f"{what}: {mine} and unsharded {theirs}"
        else:
            tolerance, nothing = max(tolerance, ROUNDED[self.model.output]), max(2e-6, ROUNDED[self.model.output] / 4)
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=nothing, msg=lambda text: f"{what}: {text}")

    def _look_up(self, part: int, ask: int, features: KeyedJaggedTensor) -> Any:
        one = self.model.parts[part]
        if one.managed:
            remapped = self.remapped[part, ask, self.trainer]
            return self.copies[part, ask](remapped), remapped
        if one.repeats and not one.pools:
            features = expanded(features)
        module, output = self.copies[part, ask], self.model.output_of(one)
        if one.of_sharder:
            return Values(self._pooled(module, features, output))
        found = module(features)
        if output == torch.float32:
            return found
        return {key: Values(rows.values().to(output)) for key, rows in found.items()}

    def _pooled(self, module: Any, features: KeyedJaggedTensor, output: torch.dtype) -> Tensor:
        """Of plain bags. It is what was pooled once that is rounded, and whose gradient is clamped."""
        names, index = features.inverse_indices_or_none() or ([], torch.empty(0))
        of_key, clip, columns = features.to_dict(), self.model.clip, []
        for config, bags in zip(module.embedding_bag_configs(), module.embedding_bags.values(), strict=True):
            for name in config.feature_names:
                one = of_key[name]
                weights = one.weights() if module.is_weighted() else None
                pooled = bags(one.values().long(), one.offsets().long(), weights)
                if clip is not None and pooled.requires_grad:
                    pooled.register_hook(lambda gradient: gradient.clamp(-clip, clip))
                pooled = pooled.to(output)
                columns.append(pooled if not names else pooled.index_select(0, index[names.index(name)]))
        return torch.cat(columns, 1)

    def _remap_and_copy(self, batches: list[Batch]) -> None:
        """Unsharded modules with the weights that each lookup has, and ids as the maps have them then."""
        self.copies = {}
        for i, part in enumerate(self.model.parts):
            for ask in range(part.asks):
                if part.managed:
                    self._remap(i, ask, [batch.features[i][ask] for batch in batches])
                module = copy.deepcopy(self.net.parts[i]) if part.managed else self.net.parts[i]
                for j in range(len(part.tables)):
                    table_group, rows = self._place(i, j)
                    weight = weight_in(module, j)
                    weight.data = torch.from_numpy(
                        self.numbers[table_group][rows, : self.job.table_groups[table_group].dim].copy()
                    )
                    weight.grad = None
                self.copies[i, ask] = module

    def _remap(self, i: int, ask: int, features: list[KeyedJaggedTensor]) -> None:
        maps, names = self.maps[i], self.maps[i]._feature_names
        of_keys = [each.to_dict() for each in features]
        values = [of_key[name].values() for name in names for of_key in of_keys]
        lengths = [of_key[name].lengths() for name in names for of_key in of_keys]
        found = maps(KeyedJaggedTensor(names, torch.cat(values), lengths=torch.cat(lengths)))
        of_rows = found.values().split([len(each) for each in values])
        for trainer in range(len(features)):
            mine = slice(trainer, None, len(features))
            self.remapped[i, ask, trainer] = KeyedJaggedTensor(
                names, torch.cat(of_rows[mine]), lengths=torch.cat(lengths[mine])
            )
        for name, evicted in maps.evict().items():
            if evicted is None or not len(evicted):
                continue
            j = int(name.removeprefix("t"))
            table_group, rows = self._place(i, j)
            spec, dim = self.job.table_groups[table_group], self.job.table_groups[table_group].dim
            new = drawn(torch.empty(len(evicted), dim, dtype=DTYPES[spec.weights]), seed=100 * i + j)
            self.numbers[table_group][rows.start + evicted.numpy(), :dim] = new.float().numpy()
            if spec.optimizer.kind == "rowwise_adagrad":
                self.numbers[table_group][rows.start + evicted.numpy(), dim:] = 0

    def _push(self, step: int, batches: list[Batch]) -> None:
        for number, table_group in enumerate(self.job.table_groups):
            dim, parts = table_group.dim, []
            for trainer in range(self.model.trainers):
                rows, gradients, rates = self.told.pushes[step, trainer]
                wanted = table_group.optimizer.lr * (0.5 ** ((step - 1) // 2) if self.model.schedule else 1.0)
                assert rates[number] == wanted, f"learning rate of step {step}"
                parts.append((rows[number].numpy(), gradients[number].numpy()))
            found: dict[int, np.ndarray] = {}
            for rows_U, gradients_UD in parts:  # in trainer order
                for row, gradient in zip(rows_U.tolist(), gradients_UD, strict=True):
                    found[row] = found[row] + gradient if row in found else gradient
            wanted_rows, wanted_gradients = self._gradients(number, batches, step)
            positions = np.array(sorted(found), np.int64)
            assert positions.tolist() == sorted(wanted_rows), f"rows of table group {number} in step {step}"
            merged = np.stack([found[row] for row in positions.tolist()]) if len(found) else np.zeros((0, dim), F32)
            theirs = torch.from_numpy(wanted_gradients[positions])
            self._close(torch.from_numpy(merged), theirs, f"gradients of table group {number}, step {step}", 1e-4)
            arguments = positions, merged, rates[number], step, dict(table_group.optimizer.fixed)
            self.numbers[number] = stepped(table_group.optimizer.kind, self.numbers[number], *arguments)
            self.numbers[number][:, :dim] = self._rounded(torch.from_numpy(self.numbers[number][:, :dim]), number)

    def _gradients(self, number: int, batches: list[Batch], step: int) -> tuple[set[int], np.ndarray]:
        """Of a table group: rows that the loss has seen, and autograd's gradients of all; of frozen tables none."""
        touched: set[int] = set()
        total = np.zeros((self.job.table_groups[number].rows, self.job.table_groups[number].dim), F32)
        for i, j, table_group, rows in self._tables():
            part = self.model.parts[i]
            if table_group != number or step in part.tables[j].frozen:
                continue
            modules = []
            for ask in range(part.asks):
                if not any(self.copies[i, ask] is module for module in modules):
                    modules.append(self.copies[i, ask])
                if part.unused and ask == part.asks - 1:
                    continue
                for trainer, batch in enumerate(batches):
                    features = self.remapped[i, ask, trainer] if part.managed else batch.features[i][ask]
                    for name in part.tables[j].features:
                        ids = features[name].values()
                        if part.repeats and not part.pools:
                            ids = expanded(features)[name].values()
                        touched.update((ids + rows.start).tolist())
            for module in modules:
                grad = weight_in(module, j).grad
                if grad is not None:
                    total[rows] += grad.numpy()
        return touched, total

    def _evaluate(self, step: int, traces: list[Any], batches: list[Batch]) -> None:
        """Lookups of an evaluation have the rows as they are after the step."""
        if step not in self.model.looks:
            assert not any(trace[3] for trace in traces)
            return
        for maps in self.maps.values():
            maps.eval()
        for i, part in enumerate(self.model.parts):
            for ask in range(part.asks):
                module = self.copies[i, ask]
                for j in range(len(part.tables)):
                    table_group, rows = self._place(i, j)
                    weight_in(module, j).data.copy_(
                        torch.from_numpy(self.numbers[table_group][rows, : self.job.table_groups[table_group].dim])
                    )
                for trainer, batch in enumerate(batches):
                    if part.managed:
                        self.remapped[i, ask, trainer] = self.maps[i](
                            in_order(batch.features[i][ask], self.maps[i]._feature_names)
                        )
        for maps in self.maps.values():
            maps.train()
        for self.trainer, (batch, trace) in enumerate(zip(batches, traces, strict=True)):
            with torch.no_grad():
                _, seen = self.net(batch)
            for number, (mine, theirs) in enumerate(zip(trace[3], seen, strict=True)):
                self._close(mine, theirs, f"evaluation {number} of step {step}, trainer {self.trainer}", 1e-4)

    def _check_maps(self, end: End) -> None:
        for i, maps in self.maps.items():
            for name, module in maps._managed_collision_modules.items():
                for buffer, value in module.state_dict().items():
                    found = end.maps[f"parts.{i}"][name]["map"][buffer]
                    assert torch.equal(found, value), f"map of {name} in part {i}: {buffer}"


def in_order(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """TorchRec's maps keep the order of the first batch's features for good."""
    return features.permute([features.keys().index(name) for name in names])


def weight_in(module: Any, table: int) -> Any:
    """Of a plain collection, or one that is feature-processed."""
    module = getattr(module, "_embedding_bag_collection", module)
    folder = module.embedding_bags if hasattr(module, "embedding_bags") else module.embeddings
    return folder[f"t{table}"].weight
