// Drives the training step by step, and draws between the steps. With `?steps=N` the page trains N steps, classifies a
// drawing, and posts its losses to the server: the test of `cargo xtask browser --test`.

import init, { Training } from "./forebay_browser.js";

const testSteps = Number(new URLSearchParams(location.search).get("steps") ?? 0);
const totalSteps = testSteps || 2000;
const element = (id) => document.getElementById(id);
const nextFrame = () => new Promise((resolve) => requestAnimationFrame(resolve));
const percent = (fraction) => `${(100 * fraction).toFixed(1)} %`;

// Returns the mean of each value and the values before it, at most `count` of them.
function runningMeans(values, count) {
  let sum = 0;
  return values.map((value, at) => {
    sum += value - (values[at - count] ?? 0);
    return sum / Math.min(at + 1, count);
  });
}

// Draws curves in the colours of the style sheet. The width of the canvas is the whole run.
function drawCurves(id, top, curves) {
  const canvas = element(id);
  const { width, height } = canvas;
  const context = canvas.getContext("2d");
  const colours = getComputedStyle(document.documentElement);
  context.clearRect(0, 0, width, height);
  context.fillStyle = "#eee";
  for (let line = 1; line < 5; line++) context.fillRect(0, (height * line) / 5, width, 1);
  context.lineWidth = 3;
  for (const [name, values, scale] of curves) {
    context.beginPath();
    context.strokeStyle = colours.getPropertyValue(`--${name}`);
    values.forEach((value, at) => {
      context.lineTo((width * (at + 1)) / totalSteps, height * (1 - Math.min(1, (scale * value) / top)));
    });
    context.stroke();
  }
}

function showProgress(reports) {
  const values = (name) => reports.map((report) => report[name]);
  const means = { loss: runningMeans(values("loss"), 20), accuracy: runningMeans(values("accuracy"), 20) };
  const { allocated, reserved } = reports.at(-1);
  const mebibytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  element("step").textContent = `${reports.length} of ${totalSteps}`;
  element("loss").textContent = means.loss.at(-1).toFixed(3);
  element("accuracy").textContent = percent(means.accuracy.at(-1));
  element("allocated").textContent = mebibytes(allocated);
  element("reserved").textContent = mebibytes(reserved);
  drawCurves("curve", 2.5, [["loss", means.loss, 1], ["accuracy", means.accuracy, 2.5]]);
  drawCurves("memory", 1.05 * reserved, [["reserved", values("reserved"), 1], ["allocated", values("allocated"), 1]]);
}

// Lets the user draw, and calls `changed` after each stroke. Returns a function that reads the pixels.
function enableDrawing(changed) {
  const canvas = element("drawing");
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const position = (event) => [(event.offsetX / canvas.clientWidth) * 28, (event.offsetY / canvas.clientHeight) * 28];
  Object.assign(context, { strokeStyle: "#fff", fillStyle: "#fff", lineWidth: 2, lineCap: "round", lineJoin: "round" });
  let isDrawing = false;
  canvas.onpointerdown = (event) => {
    isDrawing = true;
    context.beginPath();
    context.moveTo(...position(event));
    // The events of the test have no pointer to capture.
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointermove = (event) => {
    if (!isDrawing) return;
    context.lineTo(...position(event));
    context.stroke();
  };
  canvas.onpointerup = () => {
    isDrawing = false;
    context.fill();
    changed();
  };
  element("clear").onclick = () => {
    context.clearRect(0, 0, 28, 28);
    element("classes").replaceChildren();
  };
  return () => {
    const { data } = context.getImageData(0, 0, 28, 28);
    return Float32Array.from({ length: 28 * 28 }, (_, at) => data[4 * at + 3] / 255);
  };
}

function showClasses(names, probabilities) {
  const best = probabilities.indexOf(Math.max(...probabilities));
  const row = (name, at) =>
    `<tr class="${at === best ? "best" : ""}"><td>${name}</td>` +
    `<td><i style="width: ${100 * probabilities[at]}%"></i></td><td>${percent(probabilities[at])}</td></tr>`;
  element("classes").innerHTML = names.map(row).join("");
}

// Draws the outline of trousers by pointer events.
function drawTrousers() {
  const canvas = element("drawing");
  const box = canvas.getBoundingClientRect();
  const outline = [[9, 3], [19, 3], [20, 25], [16, 25], [14, 9], [12, 25], [8, 25], [9, 3]];
  const send = (type, [x, y]) => {
    const position = { clientX: box.left + (x / 28) * box.width, clientY: box.top + (y / 28) * box.height };
    canvas.dispatchEvent(new PointerEvent(type, position));
  };
  send("pointerdown", outline[0]);
  outline.forEach((corner) => send("pointermove", corner));
  send("pointerup", outline[0]);
}

async function train(lines) {
  const training = await Training.open(totalSteps);
  element("device").textContent = training.device();
  lines.push(`device ${training.device()}`, `the device was open after ${performance.now().toFixed(0)} ms`);
  const reports = [];
  let isPaused = false;
  let isDrawn = false;
  element("pause").onclick = () => {
    isPaused = !isPaused;
    element("pause").textContent = isPaused ? "Continue" : "Pause";
  };
  const pixels = enableDrawing(() => { isDrawn = true; });
  while (!testSteps || reports.length < testSteps) {
    if (!isPaused && reports.length < totalSteps) {
      const { loss, accuracy, allocated, reserved } = await training.step();
      reports.push({ loss, accuracy, allocated, reserved });
      if (reports.length === 1) lines.push(`the first step was done after ${performance.now().toFixed(0)} ms`);
      if (testSteps) lines.push(`step ${reports.length} ${loss} ${accuracy}`);
      showProgress(reports);
    }
    if (isDrawn) {
      isDrawn = false;
      showClasses(Training.classes(), await training.classify(pixels()));
    }
    if (!testSteps) await nextFrame();
  }
  lines.push(`${reports.length} steps were done after ${performance.now().toFixed(0)} ms`);
  lines.push(`memory: ${reports.at(-1).allocated} of ${reports.at(-1).reserved} bytes`);
  drawTrousers();
  if (!isDrawn) throw new Error("the drawing field received no stroke");
  const drawn = pixels();
  const probabilities = await training.classify(drawn);
  showClasses(Training.classes(), probabilities);
  const sum = probabilities.reduce((sum, probability) => sum + probability, 0);
  const covered = drawn.filter((pixel) => pixel > 0.5).length;
  if (covered < 100 || !(Math.abs(sum - 1) < 1e-3)) {
    throw new Error(`the drawing covers ${covered} pixels, and the probabilities sum to ${sum}`);
  }
  lines.push(`classified a drawing as ${document.querySelector("tr.best").textContent}`);
}

async function run() {
  const lines = [];
  // Panics of the module are written to the console.
  const log = console.error;
  console.error = (...text) => { lines.push(`console: ${text.join(" ")}`); log(...text); };
  try {
    await init();
    await train(lines);
  } catch (error) {
    lines.push(`error: ${error?.message ?? error}`);
    element("device").textContent = lines.at(-1);
  }
  if (testSteps) await fetch("/result", { method: "POST", body: lines.join("\n") });
}

run();
