// A program with the types of openapi-typescript and openapi-fetch: openapi-typescript openapi.json -o schema.d.ts
import createClient from "openapi-fetch";
import type { paths } from "./schema.js";

const headers = { Authorization: `Bearer ${process.env.PGWORKD_TOKEN}` };
const client = createClient<paths>({ baseUrl: process.env.PGWORKD_URL ?? "", headers });

const made = await client.POST("/v1/jobs", { body: { queue: "q", payload: { n: 7 }, priority: 3 } });
if (!made.data) throw new Error(made.error.detail);
const job = await client.GET("/v1/jobs/{job_id}", { params: { path: { job_id: made.data.id } } });
const found = await client.GET("/v1/batches", { params: { query: { name: "none", limit: 5 } } });
const wrong = await client.POST("/v1/jobs", { body: { queue: "" } });
if (!wrong.error) throw new Error("an empty name was taken");
console.log(job.data?.status, job.data?.priority, found.data?.batches.length, wrong.error.status, wrong.error.title);
