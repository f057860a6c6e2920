"""What is asked for: the job that servers and trainers agree on, and the settings of one process."""
