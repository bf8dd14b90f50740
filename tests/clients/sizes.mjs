// Creates jobs of all sizes with fetch, whole and in pieces: node sizes.mjs URL TOKEN SIZE...
const [url, token, ...sizes] = process.argv.slice(2);
const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };

/** @param {string} text */
async function* pieces(text) {
  const step = Math.ceil(text.length / 7);
  for (let at = 0; at < text.length; at += step) yield new TextEncoder().encode(text.slice(at, at + step));
}

for (const size of sizes.map(Number)) {
  const job = JSON.stringify({ queue: "q", payload: { text: "x".repeat(size) } });
  for (const body of [job, ReadableStream.from(pieces(job))]) {
    const answer = await fetch(`${url}/v1/jobs`, { method: "POST", headers, body, duplex: "half" });
    console.log(answer.status, (await answer.json()).created);
  }
}
