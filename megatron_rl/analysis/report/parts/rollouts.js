// Rollouts
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|\p{Surrogate}/gu;
function putText(element, text, query) {
  const plain = part => {
    if (!query) return [part];
    const found = [], low = part.toLowerCase();
    let from = 0;
    for (let place = low.indexOf(query); place >= 0 && found.length < 400; place = low.indexOf(query, from)) {
      found.push(part.slice(from, place), h("mark", {}, part.slice(place, place + query.length)));
      from = place + query.length;
    }
    return [...found, part.slice(from)];
  };
  let from = 0;
  for (const match of text.matchAll(CONTROL)) {
    element.append(...plain(text.slice(from, match.index)), h("span", { class: "control" }, `U+${match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`));
    from = match.index + match[0].length;
  }
  element.append(...plain(text.slice(from)));
  return element;
}
// The strength of a token's tint: 0 is none, 1 and more is full.
const TINTS = {
  difference: { name: "engine and trainer apart", of: (engine, trainer) => trainer == null || engine == null ? 0 : Math.abs(trainer - engine) / browse.apart },
  surprise: { name: "unlikely to the engine", of: engine => engine == null ? 0 : -engine / 5 },
};
function putTokens(box, { texts, engine, trainer, num_left_out }, tint) {
  texts.forEach((text, place) => {
    const strength = Math.min(1, Math.max(0, tint.of(engine[place], trainer?.[place])));
    const ratio = trainer ? Math.exp(trainer[place] - engine[place]) : null;
    box.append(putText(h("span", { title: `engine ${number(engine[place])}${trainer ? `, trainer ${number(trainer[place])}, ratio ${number(ratio)}` : ""}`,
      style: strength > 0.02 ? { background: `color-mix(in srgb, var(--c1) ${Math.round(strength * 45)}%, transparent)` } : {} }), text));
  });
  if (num_left_out) box.append(h("span", { class: "muted" }, ` … ${plural(num_left_out, "token")} more`));
  return box;
}
function clamped(text, query, tokens) {
  const tint = tokens && TINTS[at("tint")?.value];
  const box = tint ? putTokens(h("div", { class: "text" }), tokens, tint) : putText(h("div", { class: "text" }), text, query);
  const isLong = text.length > 700 || (text.match(/\n/g) ?? []).length > 9;
  const button = isLong ? h("button", { type: "button", class: "more", "aria-expanded": "false", onclick: () => {
    const isOpen = box.classList.toggle("open");
    button.setAttribute("aria-expanded", String(isOpen)); button.textContent = isOpen ? "Show less" : `Show all of ${plural(text.length, "character")}`;
  } }, `Show all of ${plural(text.length, "character")}`) : null;
  return [box, button];
}
// A conversation: its turns one below the other. A branch stands further in than the turn that it leaves.
const ENDS = { length: "truncated", cut: "cut off", limit: "ended by a limit", failed: "failed" };
const textsOf = response => response.turns ? response.turns.map(turn => turn.text) : [response.text];
function showTurns({ turns, tokens, num_left_out }, query) {
  const depths = [], MOST_DEPTH = 5;
  let begin = 0;
  const describe = ({ turn, num_tokens }) => {
    const whole = turn < 0 ? "the prompt" : `turn ${turn + 1}`;
    return num_tokens == null ? `follows ${whole}` : num_tokens ? `follows ${plural(num_tokens, "token")} of ${whole}` : "follows nothing";
  };
  const cut = end => ({ texts: tokens.texts.slice(begin, end), engine: tokens.engine.slice(begin, end), trainer: tokens.trainer?.slice(begin, end),
    num_left_out: Math.max(0, end - Math.max(begin, tokens.texts.length)) });
  const boxes = turns.map((turn, place) => {
    depths.push(turn.after ? (depths[turn.after.turn] ?? 0) + 1 : depths[place - 1] ?? 0);
    const end = begin + (turn.num_tokens ?? 0), own = tokens && turn.num_tokens ? cut(end) : undefined;
    begin = end;
    return h("li", { class: turn.by === "policy" ? "policy" : "environment", style: { marginInlineStart: `${Math.min(depths[place], MOST_DEPTH)}rem` } },
      h("div", { class: "bar muted" }, h("strong", {}, `${place + 1} ${turn.by}`), turn.num_tokens ? h("span", {}, plural(turn.num_tokens, "token")) : null,
        turn.reward != null ? h("span", {}, `reward ${number(turn.reward)}`) : null,
        turn.advantage != null ? h("span", {}, `advantage ${number(turn.advantage)}`) : null, turn.after ? h("span", {}, `branch, ${describe(turn.after)}`) : null),
      clamped(turn.text, query, own));
  });
  return [h("ol", { class: "turns" }, boxes), num_left_out ? h("p", { class: "muted" }, `… ${num_left_out} more`) : null];
}
const sourceOf = group => group.row.slice(0, Math.max(0, group.row.lastIndexOf(":")));
const PAGE = 8;
const browse = { groups: null, notes: [], page: 0, apart: 0 };
const mean = group => group.responses.reduce((sum, response) => sum + (response.reward ?? 0), 0) / (group.responses.length || 1);
async function loadAllRollouts() {
  const of_runs = await Promise.all(summary.runs.map((_, place) => loadRollouts(place)));
  browse.notes = of_runs.flatMap((of, place) => {
    const name = summary.runs.length > 1 ? `${summary.runs[place].label}: ` : "", kept = of.groups.length;
    const notes = [];
    if (of.num_groups > kept) notes.push(`${name}${kept.toLocaleString("en")} of ${plural(of.num_groups, "group")} are in this report. They fill its room, come from every version, and keep a prompt in all versions that have it.`);
    if (of.num_unreadable) notes.push(`${name}${plural(of.num_unreadable, "line")} of samples.jsonl could not be read.`);
    return notes;
  });
  browse.groups = of_runs.flatMap((of, run) => of.groups.map(group => ({ ...group, run, mean: mean(group),
    lower: [group.prompt, ...group.responses.flatMap(textsOf)].join("\n").toLowerCase() })));
}
// The difference that only a twentieth of the tokens exceeds is shown in full; 0 if no response has tokens.
function measureTokens() {
  const known = browse.groups.flatMap(group => group.responses).filter(response => response.tokens).map(response => response.tokens);
  const apart = known.flatMap(({ engine, trainer }) => trainer ? trainer.map((value, place) => Math.abs(value - engine[place])) : []).sort((a, b) => a - b);
  browse.apart = known.length ? Math.max(apart[Math.floor(apart.length * 0.95)] ?? 0, 1e-6) : 0;
}
async function showBrowser() {
  const field = (label, input) => h("label", {}, label, " ", input);
  const pick = (id, options) => h("select", { id }, options.map(([value, text]) => h("option", { value }, text)));
  const before = [...at("filters")?.elements ?? []].map(one => [one.id, one.value]);
  await loadAllRollouts();
  measureTokens();
  const groups = browse.groups;
  if (!groups.length) { fill("browser", h("p", { class: "muted" }, "The run has no samples: samples.jsonl is missing or empty (--log-samples).")); return; }
  const kinds = [...new Set(groups.map(group => group.kind))], sources = [...new Set(groups.map(sourceOf))].sort();
  fill("browser", h("form", { class: "bar panel filters", id: "filters", "aria-label": "Which rollouts", oninput: () => find(), onsubmit: event => event.preventDefault() },
      field("Search", h("input", { type: "search", id: "query", placeholder: "in prompts and responses", "aria-describedby": "found" })),
      summary.runs.length > 1 ? field("Run", pick("of-run", [["", "all"], ...summary.runs.map((run, place) => [String(place), run.label])])) : null,
      field("Of", pick("kind", [["", "everything"], ...kinds.map(kind => [kind, kind])])),
      sources.length > 1 ? field("Source", pick("source", [["", "all"], ...sources.map(source => [source, source])])) : null,
      field("Version from", h("input", { type: "number", id: "version-from" })), field("to", h("input", { type: "number", id: "version-to" })),
      field("A reward from", h("input", { type: "number", id: "reward-from", step: "any" })), field("to", h("input", { type: "number", id: "reward-to", step: "any" })),
      field("Row", h("input", { id: "row", size: "14", spellcheck: "false" })),
      field("Order", pick("order", [["version", "version"], ["-version", "newest first"], ["-mean", "best mean reward"], ["mean", "worst mean reward"], ["-length", "longest"]])),
      browse.apart ? field("Colour tokens by", pick("tint", [["", "nothing"], ...Object.entries(TINTS).map(([key, tint]) => [key, tint.name])])) : null,
      h("button", { type: "reset", onclick: () => setTimeout(find) }, "Clear")),
    h("p", { id: "found", role: "status", style: { marginBottom: ".5rem" } }), browse.notes.map(note => h("p", { class: "muted" }, note)),
    h("div", { id: "history" }), h("div", { id: "groups", style: { marginTop: ".75rem" } }), h("div", { class: "bar", id: "pages" }));
  for (const [id, value] of before) if (id && at(id)) at(id).value = value;
  find();
}
function find(page = 0) {
  const value = id => at(id)?.value ?? "", bound = id => value(id) === "" ? null : Number(value(id));
  const query = value("query").toLowerCase(), [from, to, low, high] = ["version-from", "version-to", "reward-from", "reward-to"].map(bound);
  const isInside = reward => (low === null || reward >= low) && (high === null || reward <= high);
  const found = browse.groups.filter(group => (!value("of-run") || group.run === Number(value("of-run"))) && (!value("kind") || group.kind === value("kind")) && (!value("source") || sourceOf(group) === value("source"))
    && (from === null || group.version >= from) && (to === null || group.version <= to) && (!value("row") || group.row === value("row"))
    && ((low === null && high === null) || group.responses.some(response => isInside(response.reward))) && (!query || group.lower.includes(query)));
  const [sign, key] = value("order").startsWith("-") ? [-1, value("order").slice(1)] : [1, value("order")];
  const rank = group => key === "length" ? group.lower.length : group[key];
  found.sort((a, b) => sign * (rank(a) - rank(b)) || a.version - b.version);
  const last = Math.max(0, Math.ceil(found.length / PAGE) - 1);
  browse.page = Math.min(page, last);
  at("found").textContent = `${plural(found.length, "group")} of ${browse.groups.length.toLocaleString("en")}`;
  fill("groups", found.slice(browse.page * PAGE, (browse.page + 1) * PAGE).map(group => showGroup(group, query, isInside)));
  const turn = (text, to) => h("button", { type: "button", disabled: to < 0 || to > last, onclick: () => { find(to); at("found").scrollIntoView({ block: "nearest" }); } }, text);
  fill("pages", last ? [turn("Previous", browse.page - 1), h("span", { class: "muted" }, `page ${browse.page + 1} of ${last + 1}`), turn("Next", browse.page + 1)] : []);
  showHistory(value("row"), found);
}
function showGroup(group, query, isInside) {
  const chip = (text, kind = "") => h("span", { class: `chip ${kind}`, title: text }, text);
  const byRow = browse.groups.filter(other => other.row === group.row).length;
  return h("article", { class: "panel", "aria-label": `Version ${group.version}, row ${group.row}` },
    h("div", { class: "bar" }, h("h3", {}, `Version ${group.version}`), summary.runs.length > 1 ? chip(summary.runs[group.run].label) : null, chip(group.kind), chip(group.row),
      chip(`mean reward ${number(group.mean)}`),
      byRow > 1 && at("row").value !== group.row ? h("button", { type: "button", onclick: () => { at("row").value = group.row; at("order").value = "version"; find(); at("found").scrollIntoView(); } }, `This prompt over ${byRow} versions`) : null),
    h("h4", { class: "muted" }, "Prompt"), clamped(group.prompt, query),
    h("div", { class: group.responses.some(response => response.turns) ? "responses talk" : "responses" }, group.responses.map((response, place) => h("div", { class: "response" },
      h("div", { class: "bar", style: { gap: ".3rem" } }, h("h4", { class: "muted" }, `Response ${place + 1}`),
        chip(`reward ${number(response.reward)}`, isInside(response.reward) && response.reward > group.mean ? "good" : ""),
        response.advantage != null ? chip(`advantage ${number(response.advantage)}`) : null,
        Object.entries(response.components ?? {}).map(([name, value]) => chip(`${name} ${number(value)}`)),
        response.num_tokens ? chip(plural(response.num_tokens, "token")) : null,
        response.turns ? chip(plural(response.num_turns, "turn")) : null,
        ENDS[response.finish_reason] ? chip([ENDS[response.finish_reason], response.failure].filter(Boolean).join(": "), "bad") : null),
      response.turns ? showTurns(response, query) : clamped(response.text, query, response.tokens)))));
}
function showHistory(row, found) {
  forget("history");
  const runs = [...new Set(found.map(group => group.run))];
  if (!row || found.length < 2) { fill("history"); return; }
  const series = runs.map((run, place) => {
    const of = found.filter(group => group.run === run).sort((a, b) => a.version - b.version);
    return { label: summary.runs.length > 1 ? `${summary.runs[run].label}: mean reward` : "mean reward", colour: COLOURS[place % 8], x: of.map(group => group.version), y: of.map(group => group.mean) };
  });
  fill("history", new Chart({ title: `Rewards of row ${row}`, series, marks: true }, { own: { from: null, to: null } }).element);
}

