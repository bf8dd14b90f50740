// pg-boss: node pgboss.mjs install | enqueue COUNT | work
// Its handler is called once per batch, so it pays for no task per job: not a like-for-like dispatch.
import { PgBoss } from "pg-boss";
import { called, inBatches } from "./tally.mjs";

const [what, count] = process.argv.slice(2);
const boss = new PgBoss({ connectionString: process.env.PGWORKD_BENCH_DSN, useListenNotify: true });
boss.on("error", console.error);
await boss.start();

if (what === "work") {
  const options = { batchSize: 5000, localConcurrency: 2, burstWhenBatchFull: true };
  await boss.work("bench", options, async (jobs) => jobs.forEach(() => called()));
  process.once("SIGTERM", () => boss.stop({ graceful: false }).then(() => process.exit(0)));
} else {
  if (what === "install") await boss.createQueue("bench", { notify: true });
  else await inBatches(Number(count), (payloads) => boss.insert("bench", payloads.map((data) => ({ data }))));
  await boss.stop({ graceful: false });
}
