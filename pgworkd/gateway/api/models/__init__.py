"""What requests and answers look like: jobs (and what all have in common), batches, operators."""
