"""Simulation of the daemon without Postgres: seeded schedules of every event, on a virtual clock."""
