"""Settings: flags, `PGWORKD_*`, `pgworkd.toml`, defaults (config, file, shown); those of a queue (queue); TLS (tls)."""
