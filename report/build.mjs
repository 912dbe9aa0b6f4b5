// Builds the page's script and style into the Python package, which carries them: installing it needs no node.
import { build } from "esbuild";

const assets = process.argv[2] ?? "../src/triptych/explaining/assets";
const shared = { bundle: true, minify: true, target: "es2022", charset: "utf8", legalComments: "none", define: { global: "globalThis" } };

// Chrome refuses workers from files beside a page on disk, so the worker travels as text inside the script.
const worker = {
  name: "worker-as-text",
  setup(context) {
    context.onResolve({ filter: /^worker:/ }, ({ path }) => ({ path: path.slice("worker:".length), namespace: "worker" }));
    context.onLoad({ filter: /.*/, namespace: "worker" }, async ({ path }) => {
      const built = await build({ ...shared, entryPoints: [`src/${path}.worker.ts`], format: "iife", write: false });
      return { contents: built.outputFiles[0].text, loader: "text" };
    });
  },
};

const licences =
  "/* Triptych's report page. It contains, under the MIT licence: @dagrejs/dagre and @dagrejs/graphlib " +
  "(c) Chris Pettitt and contributors; prismjs (c) Lea Verou; under the BSD licence: diff (c) Kevin Decker. */";

await build({
  ...shared,
  entryPoints: { report: "src/main.ts" },
  format: "iife",
  outdir: assets,
  plugins: [worker],
  banner: { js: licences },
});
await build({ ...shared, entryPoints: { report: "src/style.css" }, outdir: assets });
