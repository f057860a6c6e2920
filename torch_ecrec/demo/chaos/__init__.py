"""Disturbs real processes by a random schedule of kills and hangs, then compares: does one bit differ?

    torch-ecrec chaos --minutes 5 --seed 1 -k 4 -r 2 --servers 6 --trainers 3
    torch-ecrec chaos --minutes 5 --seed 1 --hosts 5 --elect

A short run measures the pace, so that training takes about `--minutes`. Then it trains the demonstration's model while
events come at random moments, alone or several at one instant, and trains the same again undisturbed, on this host.

The schedule stays within the contract: an event comes once all that former ones took is there again, and at one instant
at most r servers are hit, with any number of trainers, and the coordinator. A process that is stopped (SIGSTOP) goes on
(SIGCONT) after 1, 5 or 20 s; who is silent for a lease (`TORCH_ECREC_LEASE_S`, 10 s) is taken for lost meanwhile.

With `--hosts` every process is on one of several hosts, made of network namespaces (`testing/hosts.py`), and hosts die,
links are cut, slow or lossy, and with `--elect` coordinators stand by, and the one that leads and etcd are hit
(`host_events.py`). Each of these events must be felt, and nobody may be lost but whom it may cost.

Events of `FLIP_EVENTS` come alone: a bit of a record or a parity flips in the memory of a server that hosts a slot
(SIGUSR1, SIGUSR2). The next instant comes once it was found and repaired; a flip that nobody found fails the run. So
that no bit may differ at the end, servers look at records whenever they use them then, and faster in the background.

Events of `TIER_EVENTS` go with `--tier`, and come alone, too: a server's disk fails some reads, is slow for a second,
hangs or is full for good, or has a bit of a record that is not in memory flipped. What hangs for longer than a lease,
or is full, costs that server, which must end by itself. The run that it is compared with has all in memory.

With events of `BEYOND_EVENTS` or `STORE_EVENTS` the cluster writes checkpoints, to a `TroubledStore`. What is beyond
parity comes once a checkpoint counts, alone, and while the store is well. Trouble of the store lasts until it was felt
(a checkpoint was void by that very error, or opens had to wait); other events go on meanwhile, but the coordinator is
not killed while the store fails: the next one looks there at its start. Every kind that was asked for must have come,
and every such event must have had its effect: all went back, or the store's error was felt.

Written to the folder: chaos.json (arguments, schedule, events, samples of throughput and memory, verdict), chaos.png,
and the logs of all processes. A failure prints the seed.

    command.py      the command            schedule.py     what comes at one instant
    run.py          a run on one host      disturbances.py what lasts for a while, and by what it was felt
    hosts.py        a run on several       host_events.py  whom that may cost, by what it was felt
    hosted.py       services of a host     patience.py     how long it waits for a cluster to be whole
    preempted.py, power.py: a job told to end; is a wrong step found?
"""
