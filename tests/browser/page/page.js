// Checks all kernels, runs the tests, and posts their report to the server.

import init, { open, report } from "./browser_conformance.js";
import { checkKernels } from "./kernels.js";

async function run() {
  const module = await init();
  try {
    await open();
    await WebAssembly.promising(module.run_topics)();
    return `${await checkKernels()}\n${report()}`;
  } catch (error) {
    return `${report()}\nFAILED  ${error?.message ?? error}`;
  }
}

run()
  .catch((error) => `FAILED  ${error?.message ?? error}`)
  .then((text) => {
    document.getElementById("report").textContent = text;
    return fetch("/result", { method: "POST", body: text });
  });
