// Prism would look for code on the page by itself: it must be told not to before it is loaded.

(globalThis as unknown as Record<string, unknown>).Prism = { manual: true, disableWorkerMessageHandler: true };
