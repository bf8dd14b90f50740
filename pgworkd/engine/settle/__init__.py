"""Settle: every way out of `running`, in batches bounded in rows and bytes, fenced by (id, attempt, worker)."""
