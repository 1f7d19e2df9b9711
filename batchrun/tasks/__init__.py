"""What a job does with each row: `task` in the config names one of these."""
