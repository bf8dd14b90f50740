// A program with the functions of @hey-api/openapi-ts: openapi-ts -i openapi.json -o sdk
import { client } from "./sdk/client.gen.js";
import { createJob, getJob, listBatches } from "./sdk/sdk.gen.js";

client.setConfig({ baseUrl: process.env.PGWORKD_URL ?? "", auth: () => process.env.PGWORKD_TOKEN });

const made = await createJob({ body: { queue: "q", payload: { n: 7 }, priority: 3 } });
if (!made.data) throw new Error(made.error.detail);
const job = await getJob({ path: { job_id: made.data.id } });
const found = await listBatches({ query: { name: "none", limit: 5 } });
const wrong = await createJob({ body: { queue: "" } });
if (!wrong.error) throw new Error("an empty name was taken");
console.log(job.data?.status, job.data?.priority, found.data?.batches.length, wrong.error.status, wrong.error.title);
