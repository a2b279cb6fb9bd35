// Drives the training step by step, and draws between the steps. With `?steps=N` the page trains N steps and posts its
// losses to the server: the test of `cargo xtask browser --test`.

import init, { Training } from "./forebay_browser.js";

const query = new URLSearchParams(location.search);
const testSteps = Number(query.get("steps") ?? 0);
const element = (id) => document.getElementById(id);
const nextFrame = () => new Promise((resolve) => requestAnimationFrame(resolve));

function drawCurve(reports) {
  const canvas = element("curve");
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const plot = (values, top, colour) => {
    context.beginPath();
    context.strokeStyle = colour;
    values.forEach((value, at) => {
      const x = (at / Math.max(1, values.length - 1)) * canvas.width;
      context.lineTo(x, canvas.height * (1 - Math.min(1, value / top)));
    });
    context.stroke();
  };
  plot(reports.map((report) => report.loss), 2.5, "#c33");
  plot(reports.map((report) => report.accuracy), 1, "#36c");
}

function showStatus(reports) {
  const last = reports.at(-1);
  const recent = reports.slice(-50);
  const mean = recent.reduce((sum, report) => sum + report.accuracy, 0) / recent.length;
  const mib = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  element("status").textContent =
    `step ${reports.length}: loss ${last.loss.toFixed(4)} (red), accuracy ${(100 * mean).toFixed(1)} % (blue), ` +
    `tensors ${mib(last.allocated)}, pool ${mib(last.reserved)}`;
}

// Calls `changed` after each stroke on the canvas.
function enableDrawing(changed) {
  const canvas = element("drawing");
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const place = (event) => [(event.offsetX / 224) * 28, (event.offsetY / 224) * 28];
  Object.assign(context, { strokeStyle: "#fff", lineWidth: 2.5, lineCap: "round" });
  let last = null;
  canvas.onpointerdown = (event) => { last = place(event); canvas.setPointerCapture(event.pointerId); };
  canvas.onpointerup = () => { last = null; changed(); };
  canvas.onpointermove = (event) => {
    if (!last) return;
    context.beginPath();
    context.moveTo(...last);
    last = place(event);
    context.lineTo(...last);
    context.stroke();
  };
  element("clear").onclick = () => { context.clearRect(0, 0, 28, 28); changed(); };
  return () => {
    const { data } = context.getImageData(0, 0, 28, 28);
    return Float32Array.from({ length: 28 * 28 }, (_, at) => data[4 * at] / 255);
  };
}

function showClasses(names, probabilities) {
  const rows = names.map((name, at) => [name, probabilities[at]]).sort((a, b) => b[1] - a[1]);
  element("classes").innerHTML =
    rows.map(([name, share]) => `<tr><td>${name}</td><td>${(100 * share).toFixed(1)} %</td></tr>`).join("");
}

async function train() {
  const training = await Training.open(testSteps || 2000);
  const opened = performance.now();
  element("device").textContent = training.device();
  const reports = [];
  const lines = [`device ${training.device()}`, `opened ${opened.toFixed(0)} ms after the page began to load`];
  let paused = false;
  let drawn = false;
  element("pause").onclick = () => { paused = !paused; element("pause").textContent = paused ? "Continue" : "Pause"; };
  const pixels = enableDrawing(() => { drawn = true; });
  while (!testSteps || reports.length < testSteps) {
    if (!paused) {
      const { loss, accuracy, allocated, reserved } = await training.step();
      reports.push({ loss, accuracy, allocated, reserved });
      if (reports.length === 1) lines.push(`first step after ${performance.now().toFixed(0)} ms`);
      if (testSteps) lines.push(`step ${reports.length} ${loss} ${accuracy}`);
      drawCurve(reports);
      showStatus(reports);
    }
    if (drawn) {
      drawn = false;
      showClasses(Training.classes(), await training.classify(pixels()));
    }
    if (!testSteps) await nextFrame();
  }
  const shares = await training.classify(pixels());
  lines.push(`shares sum to ${shares.reduce((sum, share) => sum + share, 0)}`);
  lines.push(`memory ${reports.at(-1).allocated} of ${reports.at(-1).reserved} bytes`);
  lines.push(`trained in ${performance.now().toFixed(0)} ms`);
  return lines;
}

async function run() {
  await init();
  return train();
}

run()
  .catch((error) => [`error: ${error?.message ?? error}`])
  .then((lines) => {
    if (lines[0].startsWith("error")) element("device").textContent = lines[0];
    if (testSteps) return fetch("/result", { method: "POST", body: lines.join("\n") });
  });
