// Reads lines of JSON, {content: base64, headers, secret}, and prints for each whether standardwebhooks takes it.
const { Webhook } = require("standardwebhooks");
const { createInterface } = require("node:readline");

createInterface({ input: process.stdin }).on("line", (line) => {
  const { content, headers, secret } = JSON.parse(line);
  try {
    const message = new Webhook(secret).verify(Buffer.from(content, "base64"), headers);
    console.log(`taken ${message.type}`);
  } catch (error) {
    console.log(`refused: ${error.message}`);
  }
});
