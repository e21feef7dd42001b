// What the search box of the site answers: node search_page.js WORKER.js search_index.json < queries, one a line.
// Prints for each query a JSON list of page locations, best first. WORKER.js is the site's own web worker.
const fs = require("fs");
const vm = require("vm");

const [worker, index] = process.argv.slice(2);
const self = {};
let handle, answer;
const scope = vm.createContext({
  self,
  console,
  addEventListener: (_, listener) => { handle = listener; },
  postMessage: (message) => answer(message),
});
new vm.Script(fs.readFileSync(worker, "utf8")).runInContext(scope);
Object.defineProperty(scope, "lunr", { get: () => self.lunr });
const ask = (message) => new Promise((resolve) => { answer = resolve; handle({ data: message }); });

(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(index, "utf8"));
  await ask({ type: 0, data: { config, docs, options: { suggest: false } } });
  for (const query of fs.readFileSync(0, "utf8").split("\n").filter(Boolean)) {
    const { data } = await ask({ type: 2, data: query });
    console.log(JSON.stringify(data.items.map((sections) => sections[0].location.split("#")[0])));
  }
})();
