"""Settings: flags, `PGWORKD_*`, `pgworkd.toml`, defaults (config, file); those of a queue (queue); TLS (tls)."""
