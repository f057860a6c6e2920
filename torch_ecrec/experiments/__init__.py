"""The experiments of ECRec's paper, scaled down to one machine: what they are, how they run, what they show.

    specs/         one file for each experiment: models x modes x workers x seeds, and the claims it is held against
    catalogue.py   reads these files
    scale.py       one factor for rows and times; the models; what memory they need
    modes.py       what a mode is here: its servers, settings and checkpoints
    limits.py      less of a resource for the servers, while a mode has its turn
    emulation.py   cells without a cluster
    cells.py       runs the cells of an experiment with the parts of benchmarks (`bench/experiment.py`)
    results.py     a folder of results, in which a run that was interrupted goes on
    figures.py     draws what cells have left
    report.py      writes what is published beside what was measured

The experiments are those that the published artefact of "ECRM: Efficient Fault Tolerance for Recommendation Model
Training via Erasure Coding" (ECRec) lists. The paper's own figures are not public: what is measured here is held
against what its abstract claims, and nothing else.
"""
