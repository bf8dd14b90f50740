"""Metrics, health, boards and alert rules of a fleet; a sibling of the engine, which never imports it."""
