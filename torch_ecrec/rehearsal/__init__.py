"""`torch-ecrec rehearse`: would a training script go on to the same bits if its trainers were killed?

compare    pure: what trainers have noted of two runs (`observe/trace.py`), which steps differ, and the verdict in words
run        the script's runs, as processes
"""
