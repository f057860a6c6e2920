"""The benchmarks, as commands `torch-ecrec bench NAME`. A module NAME has `add_arguments(parser)` and `run(arguments)`.

Of real training, made of an `Experiment` each (experiment.py): modes, models, and what happens to them in turn
    train.py       throughput, CPU time, bytes and memory of a training step, beside plain TorchRec
    recovery.py    kills at steady state: how long a pause, how fast a rebuild, by size and limit
    outages.py     hosts, links and leaders that go, and drains: how long a pause; over hosts of network namespaces
    checkpoint.py  training while checkpoints are written, and restores
    scaling.py     how each cost of a step grows
    exactness.py   kills in runs of the demo: is everything that follows bit-identical?
    overlap.py     what copies between the host and a GPU overlap with
    gpu.py         the GPU's share of these, each under a time limit, in one report
Of a part alone: stores.py, codec.py, optimizers.py, operators.py, seals.py, messages.py, connections.py, storage.py,
partial.py
report.py writes docs/performance.md and the tables of docs/scaling.md from what the others left

What `torch_ecrec/experiments` shows is no benchmark as well: to go back to a checkpoint after a loss is recovery-1.
What stays has something that no experiment has: TorchRec as a rival (train, checkpoint), increments, bits and restores
(checkpoint), the limit of a rebuild and one alone (recovery), hosts, links and leaders (outages), CPU time, bytes and
memory (scaling), and the emulation that the experiments accuracy and cpr are made of, with all its settings (partial).

worker.py: a trainer process; places.py: where processes run; faults.py: kills and outages; workload.py: models and
batches; record.py: what is written
"""
