"""Is a worker in another language right? `python -m tests.conformance -- COMMAND` plays what happens in the field.

COMMAND is started for each check, against a real database and a real gateway behind a proxy that cuts and freezes. It
finds PGWORKD_URL, PGWORKD_TOKEN, PGWORKD_QUEUE and PGWORKD_LEASE_S in its environment, and handles five kinds: echo
(returns its payload), add ({"a", "b"} to {"sum"}), fail and fail_for_good ({"message"}; the second is not to be
retried), and tick ({"file", "seconds"}: appends a line to the file every 100 ms, and stops when it must).
"""
