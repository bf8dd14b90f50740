"""Simulation of the daemon without Postgres: seeded schedules of everything, on a clock that nobody waits for."""
