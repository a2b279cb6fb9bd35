// Lets the browser check the WGSL of every kernel, without compiling it for a card.

// Kernels that the browser checks at once.
const AT_ONCE = 64;

// Returns the errors of a kernel, or an empty text.
async function check(device, code) {
  device.pushErrorScope("validation");
  const module = device.createShaderModule({ code });
  const [error, info] = await Promise.all([device.popErrorScope(), module.getCompilationInfo()]);
  const messages = info.messages.filter((message) => message.type === "error");
  return messages.map((message) => message.message).join("; ") || (error?.message ?? "");
}

// Returns the report of all kernels in kernels.json, an object of WGSL by label.
export async function checkKernels() {
  const kernels = Object.entries(await (await fetch("kernels.json")).json());
  const adapter = await navigator.gpu.requestAdapter();
  const wanted = ["shader-f16", "subgroups"].filter((feature) => adapter.features.has(feature));
  const device = await adapter.requestDevice({ requiredFeatures: wanted });
  const usable = kernels.filter(([, code]) => device.features.has("shader-f16") || !code.includes("enable f16"));
  const lines = [];
  for (let start = 0; start < usable.length; start += AT_ONCE) {
    const part = usable.slice(start, start + AT_ONCE);
    const found = await Promise.all(part.map(([, code]) => check(device, code)));
    part.forEach(([label], index) => found[index] && lines.push(`FAILED  kernel ${label}: ${found[index]}`));
  }
  device.destroy();
  const counts = [usable.length - lines.length, lines.length, kernels.length - usable.length];
  lines.push(`kernels that the browser takes: ${counts[0]} passed, ${counts[1]} failed, ${counts[2]} skipped`);
  return lines.join("\n");
}
