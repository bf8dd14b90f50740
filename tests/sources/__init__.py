"""Work comes from a database, a gateway or the simulation: one suite holds them all to one contract."""
