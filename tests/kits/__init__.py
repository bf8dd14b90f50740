"""What more than one file of tests uses; each module says more.

server       the Postgres of the tests, its databases made ahead, a standby of it
proxy        a TCP proxy in front of it, which delays, drops and cuts at any message
addresses    addresses that are silent, refuse, only read, or close, beside the right one
daemon       a daemon in this process, its events and its jobs; waiting for a condition
process      a daemon in a process of its own, to be killed, frozen or blocked
apps         apps whose handlers wait until told, or of which one is odd among ordinary ones; attempts without an app
cli          commands in this process, as an operator types them
commands     commands as processes: their output, signals and exit codes; tiny workers for autoscale; systemd's socket
drivers      an application's connections, with each driver that the client knows
verbs        the verbs of schema.sql, called as SQL, and the rows that they change
sessions     several sessions of SQL: calls that wait, locks, notifications; what a statement costs
batches      batches and dependencies in SQL, and independent counts of both
alerts       deaths, groups of errors and alerts in SQL; a mail server
dying        a daemon in a process of its own whose jobs die, with alerts
flow         serialize keys, limits and rates, in SQL and in daemons that share queues
schema       the contents of the schema, for comparing installations; roles and their passwords
models       generated examples, their number and their limit of time; worlds in which several sessions play
bench        what a run of `pgworkd bench` leaves in a database, and its moments
traces       spans in memory, and a daemon that traces
metrics      snapshots made up, and pages fetched and read by prometheus_client
watched      `pgworkd run` whose metrics are watched over HTTP
prometheus   Debian's prometheus and promtool, and the series of a fleet that does not exist
grafana      what Grafana fills into the queries of a board; draws the picture of a board
docs         the pages of README.md and docs/ as Markdown; writes the tables that are made from code
planting     a copy of the project with one bug in it
"""
