// What benchmarks/tally.py is for Python: calls, the monotonic ns of the first, the ns since each insert; see there.
import { closeSync, openSync, writeSync } from "node:fs";
import { join } from "node:path";

const expected = Number(process.env.PGWORKD_BENCH_JOBS ?? 0);
const head = 24;
const buffer = Buffer.alloc(head + 8 * 4096);
const directory = process.env.PGWORKD_BENCH_TALLY;
const file = directory ? openSync(join(directory, String(process.pid)), "w+") : -1;
let calls = 0;
let noted = 0;

function write() {
  buffer.writeBigInt64LE(BigInt(calls), 0);
  buffer.writeBigInt64LE(BigInt(noted), 16);
  if (file >= 0) writeSync(file, buffer, 0, head + 8 * noted, 0);
}

// Counts one call; notes the ns since its job was inserted, where the payload says when. Node cannot map a file: it
// writes at the first call and from the last expected one on, which are the two instants that the driver waits for,
// and at its end.
export function called(insertedNs) {
  if (insertedNs) {
    buffer.writeBigInt64LE(process.hrtime.bigint() - BigInt(insertedNs), head + 8 * noted);
    noted += 1;
  }
  calls += 1;
  if (calls === 1) buffer.writeBigInt64LE(process.hrtime.bigint(), 8);
  if (calls === 1 || calls >= expected) write();
}

process.on("exit", () => {
  write();
  if (file >= 0) closeSync(file);
});

export function payload(number) {
  return { number: 1000000 + number, text: "x".repeat(70) };
}

// Calls `store` with payloads in batches of 5000, the size that the libraries' own documents use.
export async function inBatches(count, store) {
  for (let from = 0; from < count; from += 5000) {
    const size = Math.min(5000, count - from);
    await store(Array.from({ length: size }, (_, i) => payload(from + i)));
  }
}
