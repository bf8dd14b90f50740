"""What more than one file of tests uses."""
