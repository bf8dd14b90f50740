"""Where settings come from: flags, `PGWORKD_*`, `pgworkd.toml`, defaults; and what those of a queue may be."""
