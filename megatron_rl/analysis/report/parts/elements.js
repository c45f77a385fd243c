"use strict";
// Texts of runs reach the page through text nodes alone.
const at = id => document.getElementById(id);
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(9).filter(child => child != null && child !== false));
  return element;
}
const fill = (id, ...children) => at(id).replaceChildren(...children.flat(9).filter(child => child != null && child !== false));

// The source of the data: packed in this page, or the server that follows the runs.
async function unpack(id) {
  const bytes = Uint8Array.from(atob(at(id).textContent), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
const isServed = !at("summary");
let token = "", tag = "";
async function ask(path, known = "") {
  const headers = { authorization: `Bearer ${token}` };
  if (known) headers["if-none-match"] = known;
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 304) return null;
  if (answer.status === 401) throw new Error("the token is missing or wrong: open the address that the command printed");
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error);
  return { data, tag: answer.headers.get("etag") };
}
const loadRollouts = async run => isServed ? (await ask(`rollouts/${run}`)).data : JSON.parse(await unpack(`rollouts-${run}`));
let library = null;
function loadLibrary() {
  library ??= unpack("library").then(text => {
    document.head.append(h("script", {}, text));
    Bokeh.logger.set_level("error");
  });
  return library;
}

// Words
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
function number(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en", { maximumFractionDigits: size >= 1000 ? 0 : size >= 10 ? 2 : 4 });
}
function duration(seconds) {
  if (seconds < 90) return `${number(Math.round(seconds * 10) / 10)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]], BORDERS = ["solid", "dashed", "dotted", "double"];
const probe = h("span", { hidden: true });
document.body.append(probe);
function colour(name) { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; }

