// Suspends the module until the event loop has run once.
export const suspend = new WebAssembly.Suspending(() => new Promise((resolve) => {
  const channel = new MessageChannel();
  channel.port1.onmessage = () => { channel.port1.close(); resolve(); };
  channel.port2.postMessage(null);
}));
