"""A daemon without a database (`pgworkd run --remote`): the engine's, with a gateway in the place of Postgres.

`client` calls the gateway, `store` and `heartbeats` have the methods by which the engine calls the database, `pool`
waits for jobs in the gateway, and `daemon` puts them together. Needs the extra `remote` (httpx).
"""
