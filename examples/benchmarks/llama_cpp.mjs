// How many tokens llama.cpp decodes in a second: node llama_cpp.mjs DIRECTORY MODEL.gguf THREADS STEPS
// DIRECTORY is where "npm install --ignore-scripts node-llama-cpp" was run; all.py calls this.
import path from "node:path";
import {pathToFileURL} from "node:url";

const [directory, model, threads, steps] = process.argv.slice(2);
const library = path.resolve(directory, "node_modules/node-llama-cpp/dist/index.js");
const {getLlama} = await import(pathToFileURL(library).href);
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error"});
const context = await (await llama.loadModel({modelPath: model})).createContext({contextSize: 512, threads: Number(threads)});
const prompt = Array.from({length: 40}, (_, i) => i + 20);
const tokens = context.getSequence().evaluate(prompt, {temperature: 0, yieldEogToken: true});
await tokens.next();
const start = process.hrtime.bigint();
for (let step = 0; step < Number(steps); step++) await tokens.next();
console.log(Number(steps) / (Number(process.hrtime.bigint() - start) / 1e9));
await llama.dispose();
