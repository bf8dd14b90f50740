"""Which tests are slow, which need the machine to themselves, and how tests are spread over processes.

`pytest` runs the fast lane: all but the slow ones, in several processes (pytest-xdist), each with a server of its own.
`pytest -m slow` runs the others, `pytest -m ""` all, `pytest -n 0` in one process. A test given by name
(`pytest tests/x.py::test_y`) runs even if it is slow, and in this process.

Marks are set here and not in the files, as a test is slow only in comparison with the others.
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TURN, RUNNING = Path(__file__), Path(__file__).with_name("conftest.py")
"""Files to lock: whose turn it is to begin a test, and who runs one."""
FAST = "not slow"
"""The expression of `-m` in pyproject.toml."""
PROCESSES_PER_CPU = 2
"""Many tests wait most of the time: for a lease to end, a process to start, a lock."""
PROCESSES_MAX = 16

_COMMANDS = "each starts a command or a daemon in a process of its own, some of them several"
_ROUTES = "each calls the whole table of routes"
_ROWS = "thousands of rows for each case: what they cost has to show"

SLOW = {
    "tests/chaos/*": "fleets of daemons under faults, and sweeps over each message of a connection",
    "tests/push/test_push_chaos.py*": "daemons and gateways that are killed",
    "tests/push/test_node.py*": "compilers and programs of node",
    "tests/simulation/*": "whole days of a fleet in simulated time",
    "tests/conformance/*": "workers and gateways in processes of their own, behind a network that is cut",
    "tests/sweeps/*": "each operation under each fault, and servers of their own",
    # Processes
    "tests/http/test_server.py*": _COMMANDS,
    "tests/http/test_remote_*": _COMMANDS,
    "tests/http/test_probes.py*": _COMMANDS,
    "tests/http/test_events.py*": _COMMANDS,
    "tests/docs/test_blocks.py*": "each page is a session with a database, commands and daemons of its own",
    "tests/engine/test_cli_run.py*": _COMMANDS,
    "tests/engine/test_demo.py*": "whole demos, each with a server of its own",
    "tests/unit/test_typing.py*": "type checks of whole programs",
    "tests/engine/test_autoscale.py*": _COMMANDS,
    "tests/engine/test_autoscale_whole.py*": _COMMANDS,
    "tests/engine/test_bad_usage.py*": _COMMANDS,
    "tests/engine/test_cli_bench.py*leaves_nothing*": _COMMANDS,
    "tests/engine/test_cli_bench.py*loss_of_the_terminal*": _COMMANDS,
    "tests/engine/test_cli_bench.py*not_drained*": _COMMANDS,
    "tests/engine/test_cli_bench.py*more_signals*": _COMMANDS,
    "tests/engine/test_cli_bench.py*next_run*": _COMMANDS,
    "tests/engine/test_cli_bench.py*two_runs*": _COMMANDS,
    "tests/engine/test_cli_bench.py*busy_fleet*": _COMMANDS,
    "tests/engine/test_cli_bench.py*held_transaction*": _COMMANDS,
    "tests/engine/test_cli_bench.py*every_table_is_as_before*": _COMMANDS,
    "tests/engine/test_cli_bench.py*the_figures_and_the_verdict*": _COMMANDS,
    "tests/engine/test_cli_bench_faults.py*": _COMMANDS,
    "tests/engine/test_metrics_*": _COMMANDS,
    "tests/engine/test_programs_connect.py*": _COMMANDS,
    "tests/engine/test_addresses.py*falls_silent*": "a lease that must not run out",
    "tests/engine/test_addresses.py*many_silent*": "waits for many addresses",
    "tests/engine/test_addresses.py*a_process_ends*": _COMMANDS,
    "tests/engine/test_addresses.py*take_a_standby*": "waits for addresses that are silent",
    "tests/engine/test_migrate_from_*": _COMMANDS,
    "tests/sql/test_every_schema.py*any_schema*": "a hundred schemas, each installed and migrated",
    "tests/engine/test_modes_process.py*": _COMMANDS,
    "tests/engine/test_process_ends.py*its_own_fork_lives*": _COMMANDS,
    "tests/engine/test_registry.py*never_imported*": _COMMANDS,
    "tests/engine/test_registry.py*only_ever_data*": _COMMANDS,
    "tests/engine/test_secrets.py*pickles*": _COMMANDS,
    "tests/engine/test_tracing_handlers.py*the_command_traces*": _COMMANDS,
    "tests/engine/test_tracing_handlers.py*in_every_mode*": _COMMANDS,
    "tests/engine/test_parent_guard.py*": _COMMANDS,
    "tests/engine/test_secrets.py*daemon*": _COMMANDS,
    "tests/engine/test_secrets.py*the_check_sees_a_leak*": _COMMANDS,
    "tests/engine/test_secrets_cli.py*": _COMMANDS,
    "tests/engine/test_supervisor*": _COMMANDS,
    "tests/stories/test_10_autoscale.py*": _COMMANDS,
    "tests/unit/test_alert_rules.py*in_its_case_only*": "promtool, twice for each case",
    "tests/engine/test_board_prometheus.py*": "a Prometheus that scrapes for half a minute",
    "tests/unit/test_output.py*last_words*": "processes that have to end, each beside a reader that is gone or stuck",
    "tests/unit/test_output.py*several_processes*": "three processes that write 9,000 lines through a small pipe",
    "tests/unit/test_output.py*forked_child*": "children that wait for a reader",
    "tests/unit/test_output.py*in_the_middle*": "hundreds of signals in the middle of prints",
    "tests/unit/test_log.py*for_the_journal*": "each starts a process",
    "tests/unit/test_embedded.py*": "servers of their own, started, killed and started again",
    "tests/engine/test_exporter.py*": "an exporter of its own for each, read over HTTP",
    "tests/engine/test_migrate_live.py*": "migrations beside daemons and open transactions",
    "tests/sql/test_board_postgres.py*": "all queries of a board on hours of statistics",
    "tests/sql/test_migrations.py*": "databases of each version, migrated, compared and used by each role",
    "tests/engine/test_blocked_commands.py*": _COMMANDS,
    "tests/engine/test_kill_timer.py*": "processes that hold the interpreter lock until they are ended",
    "tests/engine/test_without_loop_or_gil.py*": "handlers that block daemons for up to three leases",
    # Waits
    "tests/engine/test_claims_refused.py*": "databases that refuse for several seconds",
    "tests/engine/test_loop_watch.py*": "loops that are blocked for more than a second",
    "tests/engine/test_lease*": "leases that run out, each test alone on the machine",
    "tests/stories/test_02_*": "daemons that are killed, and leases that run out",
    "tests/stories/test_03_*": "daemons that are killed, and leases that run out",
    "tests/stories/test_04_*": "occurrences, a second apart",
    "tests/stories/test_09_*": "limits of a fleet, watched while hundreds of jobs run",
    "tests/engine/test_cli_health.py*": "daemons that answer, and do not",
    "tests/engine/test_cli_doctor.py*all_wait_for*": "questions that wait for a lock as long as they may",
    "tests/engine/test_refused_claims.py*claim_waits*": "a claim that waits as long as it may",
    "tests/engine/test_retention.py*restored*": "a million rows and more, read and not read",
    "tests/engine/test_spoilt_sessions.py*": "a daemon for each way to spoil a session",
    "tests/engine/test_mixed_kinds.py*": "a rolling deploy: kinds that one daemon knows, and another does not",
    "tests/engine/test_modes.py*": "threads and processes that end, or do not",
    "tests/engine/test_settings_queues.py*": "settings that change while daemons run",
    "tests/engine/test_settler.py*": "outcomes that are delayed, locked and rejected",
    "tests/engine/test_outcomes.py*": "each outcome, with a daemon for each",
    "tests/engine/test_alerts.py*": "daemons that send alerts, and wait before the next",
    "tests/engine/test_mail.py*": "mail servers that are slow, refuse, and break off",
    "tests/engine/test_results.py*": "sessions that wait for results",
    "tests/engine/test_stopping.py*": "stops, with a daemon for each",
    "tests/push/test_sender.py*": "services that hang, or answer one byte a second",
    "tests/sql/test_heartbeat_cost.py*": _ROWS,
    "tests/sql/test_dependency_history.py*": _ROWS,
    "tests/sql/test_history_locks.py*": "a history of more than a year",
    "tests/engine/test_settle_locked.py*": "outcomes beside open transactions",
    "tests/engine/test_outcomes_taken.py*": "each outcome with each way of losing it",
    "tests/http/test_worker_input.py*": "each bad value in each call of a worker",
    "tests/engine/test_slow.py*": "runs that take several times as long as usual",
    "tests/engine/test_statistics.py*": "statistics of a fleet, over seconds",
    "tests/engine/test_wake.py*": "jobs that become due, a second or two ahead",
    "tests/push/test_callbacks.py*": "a gateway and a daemon for each",
    "tests/push/test_daemon.py*": "a daemon for each, and services that hang",
    "tests/engine/test_claims_apart.py*": "claims that are given up, and orphans",
    "tests/engine/test_control.py*": "queues that drain, and daemons that stop",
    "tests/engine/test_flow.py*": "limits of a fleet, watched while hundreds of jobs run",
    "tests/engine/test_flow_keys.py*": "limits of a fleet, watched while hundreds of jobs run",
    "tests/engine/test_idle.py*": "what an idle daemon does, for seconds",
    "tests/engine/test_runner_task_time.py*": "time-outs and grace periods, each in each mode",
    "tests/engine/test_schedule_chains.py*": "occurrences, a second apart",
    "tests/http/test_worker_faults.py*": "leases, gateways and claims that are lost",
    "tests/http/test_worker_options.py*": "leases of attempts, and workers that come back",
    "tests/http/test_workers.py*": "claims that wait, leases that run out",
    "tests/http/test_seeds.py*": "every route of two other services",
    "tests/sql/test_grants_worker.py*": "daemons as each role",
    "tests/sql/test_search_path_roles.py*": "daemons as each role",
    # Many jobs
    "tests/stories/test_13_*": "a daemon that is killed, and leases that run out",
    "tests/stories/test_12_*": "3,000 deaths, and daemons killed meanwhile",
    "tests/sql/test_deaths.py*five_thousand*": "5,000 groups of errors",
    "tests/unit/test_metrics.py*merge*": "generated snapshots of many processes",
    "tests/engine/test_ahead.py*": "alone, and hundreds of jobs whose handlers take different times",
    "tests/engine/test_flow_crowds.py*": "thousands of dependents",
    "tests/sql/test_batch_plans.py*": _ROWS,
    "tests/sql/test_dependency_pages.py*": _ROWS,
    "tests/sql/test_dependency_plans.py*": _ROWS,
    "tests/sql/test_matching.py*": _ROWS,
    "tests/sql/test_attempt_leases.py*of_many*": _ROWS,
    "tests/sql/test_settle_cost.py*": _ROWS,
    "tests/sql/test_settle_plan.py*": _ROWS,
    "tests/engine/test_client_many.py*hundred_thousand*": "100,000 jobs each",
    "tests/engine/test_large_work.py*": "payloads of megabytes over a slow connection",
    "tests/engine/test_leaks.py*": "enough starts, stops and jobs to see whether something is left behind",
    "tests/sql/test_claim_left_out.py*": _ROWS,
    "tests/sql/test_claim_places.py*": _ROWS,
    "tests/sql/test_keyed_plans.py*": _ROWS,
    "tests/unit/test_benchmarks.py*drain_row*": "a whole measurement, though a small one",
    "tests/unit/test_cliffs.py*": "whole measurements, though small ones",
    # Many cases of one promise
    "tests/http/test_access.py*": _ROUTES,
    "tests/http/test_bulk.py*": "bodies of megabytes",
    "tests/http/test_description.py*": _ROUTES,
    "tests/sql/test_batch_adders.py*": "many sessions that add to one tree",
    "tests/sql/test_dependency_crowds.py*": _ROWS,
    "tests/sql/test_grants_enqueuer.py*": "every verb and client as that role",
    "tests/sql/test_install.py*": "whole schemas installed, by psql and others",
    "tests/sql/test_claim_cursor.py*": "claims from each position, in each order",
    "tests/sql/test_error_groups.py*": "generated errors, and what they have in common",
    "tests/unit/test_metrics_server.py*": "servers, and clients that misbehave",
    "tests/sql/test_batch_races.py*": "several sessions in each order",
    "tests/sql/test_dependency_races.py*": "several sessions in each order",
    "tests/sql/test_enqueue_races.py*": "several sessions in each order",
    "tests/sql/test_serialize_races.py*": "several sessions in each order",
    "tests/engine/test_dba.py*": "dumps and restores",
    "tests/engine/test_migrate.py*": "whole schemas installed, beside sessions that hold locks",
    "tests/engine/test_settings.py*": "settings from each source, in processes",
    "tests/engine/test_tracing.py*": "each mode and each ending, traced",
    "tests/engine/test_transactions.py*": "each way in which a transaction of a job may end",
    "tests/http/test_worker_schedules.py*": "each end through each gateway, a second each until the schedule is due",
    "tests/engine/test_client_stream.py*a_late_error_undoes*": "each error with each driver",
    "tests/engine/test_cli_refusals.py*each_refused_status*": "each status with each command",
    "tests/engine/test_cli_tables.py*every_list_fits*": "each list at each width",
    "tests/engine/test_outcomes_rows.py*odd_value*": "each odd value in each column",
    "tests/engine/test_settings_cli.py*wrong_values*": "each setting with its wrong values",
    "tests/engine/test_settle_errors.py*always_rejected*": "each outcome",
    "tests/engine/test_settle_errors.py*is_isolated*": "each error of a server",
    "tests/engine/test_bad_inputs.py*": "each bad value in each place where it can come in",
    "tests/engine/test_frozen_client.py*": "each statement, read by a client that stops reading",
    "tests/engine/test_runner_task.py*alters_its_task*": "each way in which a handler can alter its task, in each mode",
    "tests/engine/test_runner_task.py*mishandled_cancellation*": "each way to mishandle a cancellation, in each mode",
    "tests/fuzz/*": "generated by hypothesis",
    "tests/sql/test_rescue_guard.py*its_own_lease*": "leases, gaps and outages, each with each",
    "tests/unit/test_schedule_dst.py*": "every minute of the days on which clocks change",
    "tests/sql/test_batch_model.py*": "a model against the database",
    "tests/sql/test_dedupe_model.py*": "a model against the database",
    "tests/sql/test_dependency_model.py*": "a model against the database",
    "tests/sql/test_flow_model.py*": "a model against the database",
    "tests/sql/test_remote_model.py*": "a model against the database",
    "tests/unit/test_cursor_model.py*": "a model of claims in simulated time",
}
"""Why a test is slow, by a pattern (fnmatch) of its id."""

ALONE = {
    "tests/engine/test_ahead.py*": "how many jobs are claimed ahead follows from how long handlers take",
    "tests/engine/test_cli_run.py*are_fast*": "a command has to answer within 2 s",
    "tests/engine/test_metrics_live.py*blocked_loop*": "a page has to come within 50 ms",
    "tests/engine/test_lease*": "leases of a second or two: who cannot renew in time must stop",
    "tests/engine/test_loop_watch.py*": "a loop that is blocked, and no other, is to be named",
    "tests/engine/test_wake.py*on_time*": "a job due has to run within moments",
    "tests/engine/test_wake.py*within_moments*": "a new job has to run within moments",
    "tests/sql/test_insert_cost.py*": "compares how long statements take",
}
"""Why no other test may run meanwhile, by a pattern of the test's id: time decides what it sees."""


def why(table: dict[str, str], item: pytest.Item) -> str | None:
    """The reason that the table has for a test; None: it is not in there."""
    return next((reason for pattern, reason in table.items() if fnmatchcase(item.nodeid, pattern)), None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of which every test is slow: to import and collect them takes each process several seconds."""
    if config.option.markexpr != FAST or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(TURN.parents[1]).as_posix()
    return any(fnmatchcase(path, pattern) for pattern in SLOW) or None


@pytest.hookimpl(tryfirst=True)  # before pytest goes by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sets the marks; those that run alone come last, so that nobody waits for them."""
    for item in items:
        for table, mark in ((SLOW, pytest.mark.slow), (ALONE, pytest.mark.alone)):
            if reason := why(table, item):
                item.add_marker(mark(reason))
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)


def pytest_collection_finish() -> None:
    """Spares each garbage collection the thousands of tests that have been collected."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Lets a slow test be run by its name; and keeps bytecode, as tests start thousands of commands and daemons."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if _names_tests(config) and config.option.markexpr == FAST:
        config.option.markexpr = ""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes `-n auto` means."""
    return 0 if _names_tests(config) else min(PROCESSES_MAX, PROCESSES_PER_CPU * len(os.sched_getaffinity(0)))


def _names_tests(config: pytest.Config) -> bool:
    return any("::" in argument for argument in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that is to be alone waits until no other process runs one, and keeps those waiting meanwhile."""
    if not hasattr(item.config, "workerinput"):
        return (yield)  # no process of pytest-xdist: there are no others
    alone = item.get_closest_marker("alone") is not None
    with TURN.open() as turn, RUNNING.open() as running:
        fcntl.flock(turn, fcntl.LOCK_EX)  # first come, first served: else those that share would never let one in
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # closing does not do it while a process forked meanwhile lives
