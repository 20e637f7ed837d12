// Check the types of src/, and bundle the route handler for Node and the two pages for browsers.
import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { build } from "esbuild";

const options = { strict: true, noEmit: true, skipLibCheck: true, jsx: "react-jsx", types: ["node"] };
const modules = { module: "esnext", moduleResolution: "bundler", target: "es2023", lib: ["es2023", "dom", "dom.iterable"] };
writeFileSync("tsconfig.json", JSON.stringify({ compilerOptions: { ...options, ...modules }, include: ["src"] }));
execFileSync("../node_modules/.bin/tsc", { stdio: "inherit" });
const common = { bundle: true, outdir: "dist", format: "esm", jsx: "automatic" };
await build({ ...common, entryPoints: ["src/route.ts"], platform: "node", packages: "external", outExtension: { ".js": ".mjs" } });
for (const name of ["chat", "assistant"]) {
  const contents = `import { createRoot } from "react-dom/client";
    import { Chat } from "./${name}";
    createRoot(document.body.appendChild(document.createElement("main"))).render(<Chat />);`;
  const stdin = { contents, loader: "tsx", resolveDir: "src" };
  const define = { "process.env.NODE_ENV": '"production"' };
  await build({ ...common, outdir: undefined, outfile: `dist/${name}.js`, stdin, define, platform: "browser" });
}
