"""The specification of a run: the job that servers and trainers agree on, and the settings of one process."""
