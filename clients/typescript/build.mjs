// Build dist/: one minified ES module for each entry, and the types. Fails if a module is too large.
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const MAX_BYTES = 4096; // minified and gzipped

await build({
  entryPoints: ["src/feedback.ts", "src/element.ts"],
  outdir: "dist",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
});
execFileSync("node_modules/.bin/tsc", { stdio: "inherit" });
for (const name of ["feedback", "element"]) {
  const size = gzipSync(readFileSync(`dist/${name}.js`), { level: 9 }).length;
  console.log(`dist/${name}.js: ${size} bytes minified and gzipped`);
  if (size >= MAX_BYTES) throw new Error(`dist/${name}.js must be smaller than ${MAX_BYTES} bytes`);
}
