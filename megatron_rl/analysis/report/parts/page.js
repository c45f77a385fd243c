// Audit and configuration
function showAudit() {
  fill("verdicts", summary.runs.map(run => {
    const audit = run.audit, title = summary.runs.length > 1 ? h("h3", {}, run.label) : null;
    if (!audit) return h("div", { class: "panel" }, title, h("p", { class: "muted" }, "The run's folder has no audit log."));
    if (audit.problem) return h("div", { class: "panel" }, title, h("p", { class: "bad" }, audit.problem));
    const { proofs } = audit;
    return h("div", { class: "panel", style: { marginBottom: ".75rem" } }, title, h("p", {}, verdict(audit),
        ` · ${audit.num_complete} of ${plural(audit.num_iterations, "iteration")} complete · ${plural(audit.num_responses, "response")} · ${plural(audit.num_lines, "line")} · ${plural(audit.num_starts, "start")}`),
      h("p", {}, `${plural(proofs.num_reports, "report")} of engines: ${proofs.num_whole} compared bit for bit with what was received, ${proofs.num_probed} with the trainer's log-probs (at most ${number(proofs.furthest)} apart on average)`),
      audit.weaker ? h("p", { class: "bad" }, audit.weaker) : null,
      h("p", { class: "muted", style: { overflowWrap: "anywhere" } }, `head ${audit.head}`),
      audit.breaches.length ? h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Breaches" }, table(["where", "breach", "detail"], audit.breaches, "Breaches", false)) : null,
      audit.num_breaches > audit.breaches.length ? h("p", { class: "muted" }, `The first ${audit.breaches.length} are shown; megatron-rl audit lists all.`) : null);
  }));
}
function showConfiguration() {
  const box = (title, content) => h("div", { class: "panel", style: { marginBottom: ".75rem" } }, h("h3", {}, title), content);
  const scroll = (label, content) => h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, content);
  const several = summary.runs.length > 1;
  fill("values", several ? box("Where the runs differ", summary.differences.length ?
      scroll("Where the runs differ", table(["name", ...summary.runs.map(run => run.label)], summary.differences.map(([section, name, texts]) => [`${section}.${name}`, ...texts.map(text => text ?? "–")]), "Where the runs differ", false))
      : h("p", { class: "muted" }, summary.runs.filter(run => run.given).length > 1 ? "All values are equal." : "Fewer than two of the runs have a config.json.")) : null,
    summary.runs.map(run => run.given ? box(several ? `Given by flags: ${run.label}` : "Given by flags", scroll(`Given by flags: ${run.label}`, table(["name", "value", "from"], run.given.map(([section, name, text, source]) => [`${section}.${name}`, text, source]), "Given by flags", false)))
      : box(run.label, h("p", { class: "muted" }, "The run's folder has no config.json."))));
}

function showAll() { showOverview(); showCurves(); showTimes(); showLedger(); showGantt(); showAudit(); showConfiguration(); }
function fail(error) { at("problem").hidden = !error; at("problem").textContent = error ? `${error.message ?? error}` : ""; }
async function follow() {
  try {
    const answer = await ask("summary", tag);
    fail(null);
    if (answer) {
      const isFirst = !tag;
      summary = answer.data; tag = answer.tag;
      showAll();
      if (isFirst) await showBrowser();
      else if (!at("newer")) at("browser").prepend(h("button", { type: "button", id: "newer", onclick: () => showBrowser().catch(fail) }, "Load newer rollouts"));
    }
    at("live").textContent = `follows the run, ${new Date().toLocaleTimeString()}`;
  } catch (error) { fail(error); at("live").textContent = "not connected"; }
  setTimeout(follow, 5000);
}
async function start() {
  const theme = at("theme");
  theme.onchange = () => { document.documentElement.dataset.theme = theme.value; redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const id of ["from", "to"]) at(id).onchange = () => { view[id] = at(id).value === "" ? null : Number(at(id).value); showView(); };
  at("reset").onclick = () => { Object.assign(view, { from: null, to: null }); showView(); };
  at("smooth").onchange = () => { view.smooth = Number(at("smooth").value); redraw(); };
  at("view").onsubmit = event => event.preventDefault();
  if (isServed) {
    // The token is kept for a reload, and removed from the address, which a person may copy.
    token = new URLSearchParams(location.hash.slice(1)).get("token") ?? sessionStorage.getItem("token") ?? "";
    sessionStorage.setItem("token", token);
    if (location.hash.includes("token=")) history.replaceState(null, "", location.pathname);
    return follow();
  }
  summary = JSON.parse(await unpack("summary"));
  showAll();
  // Read when a person scrolls near, so that the page opens at once.
  new IntersectionObserver((entries, observer) => {
    if (entries.some(entry => entry.isIntersecting)) { observer.disconnect(); showBrowser().catch(fail); }
  }, { rootMargin: "600px" }).observe(at("rollouts"));
}
start().catch(fail);
