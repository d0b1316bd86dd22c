// Writes versions.json (what vega.js holds, and its hash) and LICENSES.txt from what esbuild says it has bundled.
import { createHash } from "node:crypto";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";

const [built, bundle, out] = process.argv.slice(2); // folder of the build, the bundle, where to write
const { inputs } = Object.values(JSON.parse(readFileSync(join(built, "meta.json"), "utf8")).outputs)[0];
const folders = new Set();
for (const [path, { bytesInOutput }] of Object.entries(inputs)) {
  if (bytesInOutput > 0 && path.includes("node_modules")) {
    let folder = dirname(join(built, path));
    while (!existsSync(join(folder, "package.json")) || !JSON.parse(readFileSync(join(folder, "package.json"))).version)
      folder = dirname(folder);
    folders.add(folder);
  }
}
const packages = {};
const holders = new Map(); // text of a licence -> the packages that have it
for (const folder of [...folders].sort()) {
  const { name, version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  const text = readFileSync(file ? join(folder, file) : join(built, "node_modules/vega/LICENSE"), "utf8").trim();
  packages[name] = version;
  holders.set(text, [...(holders.get(text) ?? []), `${name} ${version} (${license})`]);
}
const sha256 = createHash("sha256").update(readFileSync(bundle)).digest("hex");
writeFileSync(join(out, "versions.json"), JSON.stringify({ sha256, packages }, null, 1) + "\n");
writeFileSync(
  join(out, "LICENSES.txt"),
  "vega.js is made of these packages, under these licences.\n\n" +
    [...holders].map(([text, names]) => `${names.join("\n")}\n\n${text}\n`).join(`\n${"-".repeat(80)}\n\n`)
);
