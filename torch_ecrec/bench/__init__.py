"""Measurements, as commands: `torch-ecrec bench NAME`. A module NAME has `add_arguments(parser)` and `run(arguments)`.

train.py       throughput, CPU time, bytes and memory of a training step, beside plain TorchRec; systems take turns
recovery.py    kills at steady state: how long a pause, how fast a rebuild; beside a restart from a checkpoint
outages.py     hosts, links and leaders that go, and drains: how long a pause; over hosts of network namespaces
codec.py       encode, fold and decode, beside memcpy and ISA-L
scaling.py     how each cost of a step grows
exactness.py   kills in real runs: is everything that follows bit-identical, and how long does training pause?
report.py      writes docs/performance.md and the tables of docs/scaling.md from what the others left

workload.py    models and batches; worker.py, recovery_worker.py: a trainer process; record.py: what is written
"""
