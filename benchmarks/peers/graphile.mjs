// graphile-worker: node graphile.mjs install | enqueue COUNT | work
// GRAPHILE_PRESET is the worker part of its preset, as JSON. It says what its first fetch brought.
import { makeWorkerUtils, run } from "graphile-worker";
import { EventEmitter } from "node:events";
import { called, inBatches } from "./tally.mjs";

const connectionString = process.env.PGWORKD_BENCH_DSN;
const [what, count] = process.argv.slice(2);

if (what === "work") {
  const events = new EventEmitter();
  events.once("localQueue:getJobs:complete", ({ jobs }) => console.error(`local queue: ${jobs.length} jobs in one fetch`));
  const runner = await run({
    preset: { worker: { connectionString, events, ...JSON.parse(process.env.GRAPHILE_PRESET) } },
    taskList: { bench: async (payload) => called(payload.inserted_ns) },
    events,
  });
  await runner.promise;
} else {
  const utils = await makeWorkerUtils({ connectionString });
  if (what === "install") await utils.migrate();
  else
    await inBatches(Number(count), (payloads) =>
      utils.addJobs(payloads.map((payload) => ({ identifier: "bench", payload }))),
    );
  await utils.release();
}
