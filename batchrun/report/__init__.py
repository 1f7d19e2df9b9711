"""What a job tells about itself: progress while it runs, metrics and a summary afterwards."""
