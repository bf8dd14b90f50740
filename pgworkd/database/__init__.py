"""The only importers of asyncpg: connections, the functions of `schema.sql` as methods, LISTEN, migrations.

connection        a connection that reconnects, and the pool of `job.transaction()`      session  what each one sets
driver_errors     which errors mean "try again", "lost", "refused"
store             the engine's functions, one method each; claims, claim_connections, heartbeat_store, schedule_store,
                  settle_statements: its parts
listener          LISTEN, and finding out that it died        reconnect  back-off, and one log line per outage
schema            installing and verifying the schema         grants     the roles
"""
