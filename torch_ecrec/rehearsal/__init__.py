"""Rehearses restarts of a training script (`torch-ecrec rehearse`): does it go on to the same bits?

compare    pure: what trainers have noted of two runs (`observe/trace.py`), which steps differ, and the verdict in words
run        the script's runs, as processes
"""
