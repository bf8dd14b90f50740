"""The only importers of asyncpg: connections, the functions of `schema.sql` as methods, LISTEN, migrations.

connection        a connection that reconnects, and the pool of `job.transaction()`      session  session settings
driver_errors     which errors mean "try again", "connection lost", "rejected"
store             the engine's functions, one method each; claims, claim_connections, heartbeat_store, schedule_store,
                  settle_statements: its parts
listener          LISTEN, and probing its connection          reconnect  backoff, and one event per outage
schema            installing and verifying the schema         grants     the roles
"""
