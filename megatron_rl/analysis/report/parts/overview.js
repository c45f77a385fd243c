// Overview
function change(curve) {
  if (!curve) return null;
  return [number(curve.y[curve.y.length - 1]), h("small", {}, `from ${number(curve.y[0])} at version ${curve.x[0]}`)];
}
function verdict(audit) {
  if (!audit) return h("span", { class: "muted" }, "no log");
  if (audit.problem) return h("span", { class: "bad" }, "not readable");
  return audit.num_breaches ? h("span", { class: "bad" }, plural(audit.num_breaches, "breach").replace("breachs", "breaches")) : h("span", { class: "good" }, "no breach");
}
function drift(found) {
  if (!found) return null;
  if (found.problem) return h("span", { class: "bad" }, "not readable");
  const causes = found.sides.reduce((sum, side) => sum + side.causes.length, 0);
  const far = found.sides.map(side => `${side.name} ${side.difference.toExponential(1)}`).join(", ");
  return [h("span", { class: causes ? "bad" : "good" }, causes ? plural(causes, "cause") : "healthy"), h("small", {}, `${far} from exact`)];
}
const totalOf = times => Object.values(times.seconds).map(means => means.reduce((sum, mean, bar) => sum + mean * times.num[bar], 0));
function showOverview() {
  const title = summary.runs.map(run => run.label).join(", ");
  document.title = `${title} – report`;
  at("title").textContent = title;
  fill("cards", summary.runs.map(run => {
    const seconds = totalOf(run.times).reduce((a, b) => a + b, 0) + run.start_seconds;
    const facts = [["Iterations", plural(run.num_iterations, "iteration").split(" ")[0]], ["Reward", change(run.curves["reward/mean"])],
      ["Loss", run.curves["reward/mean"] ? null : change(run.curves.loss)], ["Loss, held out", change(run.curves["evaluation/loss"])],
      [`Evaluation, ${run.pass_name}`, change(run.curves["evaluation/pass"])], ["Time", [duration(seconds), run.start_seconds ? h("small", {}, `${duration(run.start_seconds)} of it before iteration 1`) : null]],
      ["Tokens a second", change(run.curves["time/trained_tokens_per_second"])], ["Audit", [verdict(run.audit), run.audit?.num_responses ? h("small", {}, plural(run.audit.num_responses, "response")) : null]],
      ["Drift", drift(run.drift)],
      ["Parameters", run.parameters ? [Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(run.parameters), run.devices.trainer ? h("small", {}, `on ${plural(run.devices.trainer, "device")}`) : null] : null]];
    return h("div", { class: "panel", style: { marginBottom: ".75rem" } },
      summary.runs.length > 1 ? h("h3", { style: { marginBottom: ".4rem" } }, run.label) : null,
      h("dl", { class: "cards", style: { margin: "0" } }, facts.filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      (run.drift?.sides ?? []).flatMap(side => side.causes.map(cause => h("p", { class: "bad" }, `Drift of the ${side.name}: ${cause}`))),
      h("p", { class: "muted", style: { marginTop: ".5rem" } }, run.folder,
        Object.keys(run.nonfinite).length ? h("span", { class: "bad" }, ` · not finite: ${Object.entries(run.nonfinite).map(([name, count]) => `${name} in ${plural(count, "version")}`).join(", ")}`) : null));
  }));
}

// Time
const SPANS = ["train", "wait", "publish", "update", "evaluate", "save", "other"];
function showTimes() {
  forget("times");
  const orders = summary.runs.map(run => Object.keys(run.times.seconds));
  const spans = [...SPANS, ...new Set(orders.flat())].filter((span, place, all) => all.indexOf(span) === place && orders.flat().includes(span));
  if (!spans.length) { fill("times", h("p", { class: "muted" }, "The metrics have no times.")); return; }
  const totals = summary.runs.map(run => {
    const of = totalOf(run.times), names = Object.keys(run.times.seconds);
    return Object.fromEntries(names.map((name, place) => [name, of[place]]));
  });
  const rows = spans.map((span, place) => [span, ...totals.map(of => {
    const all = Object.values(of).reduce((a, b) => a + b, 0), share = (of[span] ?? 0) / (all || 1);
    return h("span", {}, h("span", { class: "share", style: { width: `${Math.round(share * 120)}px`, background: `var(${COLOURS[place % 8]})` } }),
      ` ${(100 * share).toFixed(1)}% · ${duration(of[span] ?? 0)}`);
  })]);
  fill("times", h("div", { class: "panel scroll", tabindex: "0", role: "group", "aria-label": "Shares of the time" }, table(["part", ...summary.runs.map(run => run.label)], rows, "Shares of the time", false)),
    h("div", { class: "charts", style: { gridTemplateColumns: "minmax(0, 1fr)" } }, summary.runs.map(run => {
      const { first, last, seconds } = run.times, below = first.map(() => 0);
      const series = spans.filter(span => seconds[span]).map(span => {
        const bottom = [...below], top = seconds[span].map((value, bar) => below[bar] += value);
        return { label: span, colour: COLOURS[spans.indexOf(span) % 8], x: first.map((x, bar) => (x + last[bar]) / 2), width: first.map((x, bar) => (last[bar] - x + 1) * 0.9),
          y: top, bottom, top, shown: seconds[span] };
      });
      const title = `Seconds of an iteration${summary.runs.length > 1 ? `: ${run.label}` : ""}${last.some((x, bar) => x > first[bar]) ? ", means of neighbours" : ""}`;
      return new Chart({ title, series }, { wide: true, own: { from: first[0] - 0.5, to: last[last.length - 1] + 0.5 } }).element;
    })), h("p", { class: "muted" }, "A tall part tells what to change: see the table “What to do about the time” of docs/metrics.md."));
}

