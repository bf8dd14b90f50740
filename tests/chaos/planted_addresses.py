"""Bugs planted into what connects: lists of hosts, DSNs, poolers, starts that are refused."""

from __future__ import annotations

from tests.chaos.bug import Bug, python
from tests.kits.planting import Planted

_ADDRESSES = "tests/engine/test_addresses.py"
_START = "tests/engine/test_start.py"
_CONNINFO = "tests/unit/test_conninfo.py"
_PROGRAMS = "tests/engine/test_programs_connect.py"

BUGS = (
    python(
        "a silent address is waited for until the limit",
        "core/race",
        "                with anyio.move_on_after(stagger_s):\n                    await ended.wait()\n",
        "                await ended.wait()\n",
        tests=_ADDRESSES,
    ),
    python(
        "with many silent addresses the last is never tried",
        "core/race",
        "stagger_s = min(STAGGER_S if stagger_s is None else stagger_s, limit_s / 2 / max(1, len(attempts)))",
        "stagger_s = STAGGER_S",
        tests=_ADDRESSES,
    ),
    python(
        "an attempt begins although another has succeeded",
        "core/race",
        "                if found or final:\n                    break\n",
        "",
        tests=_ADDRESSES,
    ),
    python(
        "the address that answered last is forgotten",
        "database/addresses",
        "        _last[self._purpose] = (host, address)\n",
        "",
        tests=_ADDRESSES,
    ),
    python(
        "the address that answered last is used although its name has moved",
        "database/addresses",
        "            addresses = await self._looked_up(host)\n",
        "            last = _last.get(self._purpose)\n"
        "            addresses = [last[1]] if last else await self._looked_up(host)\n",
        tests=_ADDRESSES,
    ),
    python(
        "a silent name server holds up all look-ups",
        "core/look_up",
        'threading.Thread(target=ask, name=f"pgworkd look-up {name}", daemon=True).start()',
        "loop.run_in_executor(None, ask)",
        tests="tests/push/test_sender.py -k silent_name_server",
    ),
    python(
        "a silent name server keeps the process from ending",
        "core/look_up",
        'name=f"pgworkd look-up {name}", daemon=True)',
        'name=f"pgworkd look-up {name}")',
        tests=_ADDRESSES,
    ),
    python(
        "the certificate is verified for the address instead of the name",
        "database/addresses",
        "name = host if ssl else None",
        "name = self._address if ssl else None",
        tests="tests/engine/test_tls.py",
    ),
    python(
        "a statement is cancelled at whichever address the name has first",
        "database/addresses",
        "create_connection(factory, self._address, port, ssl=ssl, server_hostname=name)",
        "create_connection(factory, host if self.is_open else self._address, port, ssl=ssl, server_hostname=name)\n"
        "        self.is_open = True",
        tests=_ADDRESSES,
    ),
    python(
        "the connect_timeout of the DSN has no effect",
        "database/addresses",
        'limit_s = self._told.number("connect_timeout") or self._left_s()',
        "limit_s = self._left_s()",
        tests=_ADDRESSES,
    ),
    python(
        "a wrong password is tried on every host",
        "database/addresses",
        "            if is_judgement(error):\n                raise\n",
        "",
        tests=_ADDRESSES,
    ),
    python(
        "a standby waits for a silent primary until the limit",
        "database/connection",
        "            patience.deadline = min(patience.deadline, anyio.current_time() + OTHERS_S)\n",
        "",
        tests=_ADDRESSES,
    ),
    python(
        "a refused start ends",
        "engine/life/startup",
        "except (DatabaseUnavailable, SchemaAwaited, NotAdopted, AccessRefused) as error:",
        "except (DatabaseUnavailable, SchemaAwaited, NotAdopted) as error:",
        tests=_START,
    ),
    python(
        "a start says once what it waits for",
        "database/reconnect",
        "if is_new or is_other or now_s - self._said_at >= self._remind_s:",
        "if is_new or is_other:",
        tests=_START,
    ),
    python(
        "another refusal is not told",
        "database/reconnect",
        "if is_new or is_other or now_s",
        "if is_new or now_s",
        tests=_START,
    ),
    python(
        "a refused login is tried every two seconds",
        "engine/life/startup",
        "return max(self._refused_s, self._outage.failed(error))",
        "return self._outage.failed(error)",
        tests=_START,
    ),
    python(
        "a gateway does not start while the database refuses it",
        "cli/gateway",
        "except (DatabaseUnavailable, AccessRefused):",
        "except DatabaseUnavailable:",
        tests=f"{_PROGRAMS}::test_others_with_a_wrong_password_wait_and_say_so",
    ),
    python(
        "an autoscaler does not start while the database refuses it",
        "processes/autoscaler",
        "except (DatabaseUnavailable, SchemaAwaited, AccessRefused) as error:",
        "except (DatabaseUnavailable, SchemaAwaited) as error:",
        tests=f"{_PROGRAMS}::test_others_with_a_wrong_password_wait_and_say_so",
    ),
    python(
        "the exporter does not log that it is refused",
        "metrics/exporter",
        "            self._outage.failed(error)\n",
        "",
        tests=f"{_PROGRAMS}::test_others_with_a_wrong_password_wait_and_say_so",
    ),
    python(
        "the status of --processes does not say what they wait for",
        "processes/supervisor",
        "                    child.status = value\n",
        "                    pass\n",
        tests=f"{_PROGRAMS}::test_a_daemon_with_a_wrong_password_waits_and_says_so[processes]",
    ),
    python(
        "a daemon ends when the gateway refuses its token",
        "remote/client",
        'return AccessRefused(f"the gateway refuses',
        'return UsageError(f"the gateway refuses',
        tests="tests/http/test_remote_daemon_start.py",
    ),
    python(
        "channel_binding is ignored",
        "settings/conninfo",
        "if self.is_bound and mode not in VERIFYING and",
        "if False and",
        tests=_CONNINFO,
    ),
    python(
        "an unknown parameter is taken",
        "settings/conninfo",
        "            yield _unknown(told, name)\n",
        "            pass\n",
        tests=_CONNINFO,
    ),
    python(
        "a plus in a DSN is read as a blank",
        "core/dsn",
        "{unquote(name): unquote(value) for name, _, value in pairs}",
        '{unquote(name): unquote(value.replace("+", " ")) for name, _, value in pairs}',
        tests=_CONNINFO,
    ),
    python(
        "a folder with colons is read as a host and a port",
        "settings/conninfo",
        'elif not name.startswith("/") and not is_address(name) and ":" in name:',
        'elif not is_address(name) and ":" in name:',
        tests=_CONNINFO,
    ),
    python(
        "what require_auth forbids is given to any server",
        "settings/conninfo",
        'if "require_auth" in given and told.remote and',
        "if False and",
        tests=_CONNINFO,
    ),
    Bug(
        Planted(
            "grants need a superuser",
            "pgworkd/sql/grants.sql",
            "    EXECUTE format('GRANT %I TO %I', v_owner, current_user)",
            "    RETURN; EXECUTE format('GRANT %I TO %I', v_owner, current_user)",
        ),
        tests="tests/sql/test_grants_managed.py",
    ),
)
