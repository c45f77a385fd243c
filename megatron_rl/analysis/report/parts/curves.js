// Curves
let summary = { runs: [] };
const OF_REWARD = ["reward/mean", "reward/std", "reward/min", "reward/max", "reward/all_equal_groups"];
const middle = name => name.slice(name.indexOf("/") + 1, name.lastIndexOf("/"));
const CHARTS = [
  { title: "Reward", lines: [["reward/mean", "mean"]], merged: true, more: name => name.startsWith("reward/") && !OF_REWARD.includes(name) },
  { title: "Reward by source", lines: [], more: name => /^sources\/.*\/reward$/.test(name), name: middle },
  { title: "Evaluation", lines: [["evaluation/pass", null], ["evaluation/mean", "mean reward"]], merged: true, marks: true },
  { title: "Evaluation by source, mean reward", lines: [], marks: true, more: name => /^evaluation\/sources\/.*\/mean$/.test(name), name: name => middle(middle(name) + "/") },
  { title: "Spread of rewards", lines: [["reward/std", "deviation"], ["reward/min", "least"], ["reward/max", "largest"]] },
  { title: "Groups of equal rewards", lines: [["reward/all_equal_groups", "groups"], ["groups", "of all"]] },
  { title: "Length of responses, tokens", lines: [["responses/length_mean", "mean"], ["responses/length_max", "longest"], ["evaluation/length_mean", "in evaluations"]] },
  { title: "Truncated responses, share", lines: [["responses/truncated", "truncated"]] },
  { title: "Failed responses, share", lines: [["responses/failed", "failed"], ["responses/unscored", "not scored"]] },
  { title: "Failed responses by cause", lines: [], more: name => name.startsWith("responses/failures/"), name: name => name.split("/")[2] },
  { title: "Divergence from the reference", lines: [["kl", "KL"]] },
  { title: "Divergence from the teacher", lines: [["teacher_kl", "KL"]] },
  { title: "Mismatch of engine and trainer", lines: [["mismatch/mean", "mean"], ["mismatch/max", "largest"], ["mismatch/kl", "KL"]], log: true },
  { title: "Entropy, nats a token", lines: [["entropy", "of what was sampled"], ["entropy_policy", "of the policy"]] },
  { title: "Clipped tokens, share", lines: [["clip_fraction_low", "below"], ["clip_fraction_high", "above"], ["clip_fraction_dual", "dual"]] },
  { title: "Probability ratio", lines: [["ratio", "mean"]] },
  { title: "Correction for the engine", lines: [["correction/mean", "mean weight"], ["correction/bounded", "bounded"], ["correction/rejected", "rejected"]] },
  { title: "Loss", lines: [["loss", "loss"], ["evaluation/loss", "held out"]] },
  { title: "Gradient norm", lines: [["gradient_norm", "norm"]], log: true },
  { title: "Learning rate", lines: [["learning_rate", "rate"]] },
  { title: "Tokens a second", lines: [["time/generated_tokens_per_second", "generated"], ["time/trained_tokens_per_second", "trained"]] },
  { title: "Tokens a second and device", lines: [["per_device/generated_tokens_per_second", "generated"], ["per_device/trained_tokens_per_second", "trained"]] },
  { title: "Model FLOPs utilisation", lines: [["per_device/model_flops_utilisation", "of the peak"]] },
  { title: "Seconds of an iteration", lines: [["time/iteration", "iteration"]] },
];
function listCharts(runs) {
  const used = new Set(), charts = [];
  const make = (chart, lines) => {
    const series = [];
    lines.forEach(([name, label], kind) => runs.forEach((run, place) => {
      used.add(name);
      const curve = run.curves[name];
      // The mean of one reward function is that function, and with rewards of 0 and 1 it may be the share that passes.
      if (!curve || chart.merged && series.some(other => other.run === run && String(other.y) === String(curve.y))) return;
      const text = label ?? run.pass_name;
      series.push({ ...curve, run, label: runs.length > 1 ? `${run.label}: ${text}` : text,
        colour: COLOURS[(runs.length > 1 ? place : kind) % 8], dash: runs.length > 1 ? kind % 4 : 0 });
    }));
    return series.length ? [{ ...chart, series }] : [];
  };
  const names = [...new Set(runs.flatMap(run => Object.keys(run.curves)))];
  for (const chart of CHARTS) {
    const more = chart.more ? names.filter(chart.more).map(name => [name, (chart.name ?? (of => of.slice("reward/".length)))(name)]) : [];
    charts.push(...make(chart, [...chart.lines, ...more]));
  }
  const others = names.filter(name => !used.has(name)).flatMap(name => make({ title: name }, [[name, name.split("/").pop()]]));
  return [charts, others];
}
function smoothed(ys, weight) {
  let mean = 0, share = 0;
  return ys.map(y => { mean = weight * mean + (1 - weight) * y; share = weight * share + 1 - weight; return mean / share; });
}
const view = { from: null, to: null, smooth: 0, cursor: null };
const shown = new Map();
class Chart {
  constructor(spec, options = {}) {
    this.spec = spec; this.options = options; this.hidden = new Set(); this.model = null;
    this.values = spec.series.map(() => h("span"));
    this.keys = spec.series.map((series, place) => h("button", { type: "button", "aria-pressed": "true", onclick: () => this.toggle(place) },
      h("i", { style: { borderColor: `var(${series.colour})`, borderTopStyle: BORDERS[series.dash ?? 0] } }), series.label, " ", this.values[place]));
    this.plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart",
      "aria-label": `${spec.title}, over versions. Arrow keys read values, plus and minus zoom, 0 shows all.`, onkeydown: event => this.press(event) });
    this.table = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `${spec.title}: table` });
    this.element = h("figure", { class: `panel ${options.wide ? "wide" : ""}` }, h("figcaption", {}, h("h3", {}, spec.title)),
      h("ul", { class: "legend" }, this.keys.map(key => h("li", {}, key))), this.plot,
      h("details", { ontoggle: event => event.target.open && this.tabulate() }, h("summary", {}, "As a table"), this.table));
    this.read(null);
    shown.set(this.plot, this);
    watcher.observe(this.plot);
  }
  get own() { return this.options.own ?? view; }
  bounds() {
    const xs = this.spec.series.flatMap(series => [series.x[0], series.x[series.x.length - 1]]);
    const first = Math.min(...xs), last = Math.max(...xs), room = Math.min((last - first) / 100, 0.4);
    const start = this.own.from ?? first - room, end = this.own.to ?? last + room;
    return end > start ? [start, end] : [start - 0.5, start + 0.5];
  }
  heights([start, end]) {
    const ys = this.spec.series.flatMap((series, place) => this.hidden.has(place) ? [] :
      series.y.filter((y, index) => series.x[index] >= start && series.x[index] <= end && (!this.spec.log || y > 0)));
    if (!ys.length) return [0, 1];
    let low = ys.reduce((a, b) => Math.min(a, b)), high = ys.reduce((a, b) => Math.max(a, b));
    if (this.spec.log) return [low / 1.3, high * 1.3];
    if (low === 0 && high === 0) return [-0.05, 1];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low - room, high + room];
  }
  async draw() {
    await loadLibrary();
    const text = colour("--muted"), line = colour("--line"), [start, end] = this.bounds(), [low, high] = this.heights([start, end]);
    const isCoarse = matchMedia("(pointer: coarse)").matches;
    const figure = new Bokeh.Plotting.Figure({ sizing_mode: "stretch_both", toolbar_location: null, tools: isCoarse ? "" : "xbox_zoom",
      x_range: new Bokeh.Range1d({ start, end }), y_range: new Bokeh.Range1d({ start: low, end: high }),
      y_axis_type: this.spec.log ? "log" : "linear", background_fill_alpha: 0, border_fill_alpha: 0, outline_line_color: null,
      min_border: 4, lod_threshold: null });
    for (const axis of [figure.xaxis, figure.yaxis]) Object.assign(axis, { major_label_text_color: text, axis_line_color: line,
      major_tick_line_color: line, minor_tick_line_color: null, major_label_text_font_size: "11px", major_label_text_font: "system-ui" });
    if (!this.spec.log) figure.yaxis.formatter = new Bokeh.BasicTickFormatter({ power_limit_low: -4, power_limit_high: 6 });
    Object.assign(figure.xgrid, { grid_line_color: null });
    Object.assign(figure.ygrid, { grid_line_color: line });
    this.glyphs = this.spec.series.map(series => {
      const source = new Bokeh.ColumnDataSource({ data: series.top ? { x: series.x, top: series.top, bottom: series.bottom, width: series.width } : { x: series.x, y: series.y } });
      const look = { line_color: colour(series.colour), line_dash: DASHES[series.dash ?? 0] };
      if (series.top) return [figure.vbar({ field: "x" }, { field: "width" }, { field: "top" }, { field: "bottom" }, { source, fill_color: look.line_color, line_color: null })];
      const made = [];
      if (view.smooth && !this.options.own && series.x.length > 2) {
        made.push(figure.line({ field: "x" }, { field: "y" }, { source, ...look, line_width: 1, line_alpha: 0.3 }));
        const data = { x: series.x, y: smoothed(series.y, view.smooth) };
        made.push(figure.line({ field: "x" }, { field: "y" }, { source: new Bokeh.ColumnDataSource({ data }), ...look, line_width: 2 }));
      } else if (!this.spec.points) made.push(figure.line({ field: "x" }, { field: "y" }, { source, ...look, line_width: 1.7 }));
      if (this.spec.marks || this.spec.points || series.x.length === 1)
        made.push(figure.scatter({ field: "x" }, { field: "y" }, { source, size: 5, fill_color: look.line_color, line_color: null }));
      return made;
    });
    this.glyphs.forEach((made, place) => made.forEach(glyph => { glyph.visible = !this.hidden.has(place); }));
    this.cursor = new Bokeh.Span({ dimension: "height", location: null, line_color: text, line_width: 1, line_dash: [3, 3] });
    figure.add_layout(this.cursor);
    figure.on_event("mousemove", event => this.point(event.x));
    figure.on_event("tap", event => this.point(event.x));
    figure.on_event("mouseleave", () => this.point(null));
    figure.on_event("doubletap", () => this.zoom(null, null));
    figure.on_event("rangesupdate", event => {
      const [first, last] = this.bounds();
      if (Math.abs(event.x0 - first) + Math.abs(event.x1 - last) > (last - first) * 1e-6) this.zoom(Math.ceil(event.x0), Math.floor(event.x1));
    });
    this.view?.remove?.();
    this.plot.replaceChildren();
    this.model = figure;
    this.view = await Bokeh.Plotting.show(figure, this.plot);
    hush(this.plot);
  }
  zoom(from, to) {
    if (from !== null && to !== null && to <= from) to = from + 1;
    Object.assign(this.own, { from, to });
    if (this.options.own) this.frame(); else showView();
  }
  frame() {
    if (!this.model) return;
    const [start, end] = this.bounds(), [low, high] = this.heights([start, end]);
    this.model.x_range.setv({ start, end });
    this.model.y_range.setv({ start: low, end: high });
  }
  toggle(place) {
    if (!this.hidden.delete(place)) this.hidden.add(place);
    this.keys[place].setAttribute("aria-pressed", String(!this.hidden.has(place)));
    this.glyphs?.[place].forEach(glyph => { glyph.visible = !this.hidden.has(place); });
    this.frame();
  }
  point(x) {
    const [start, end] = this.bounds();
    this.own.cursor = x === null ? null : Math.round(Math.min(Math.max(x, start), end));
    const charts = this.options.own ? [this] : [...shown.values()].filter(chart => !chart.options.own && (chart === this || chart.isVisible));
    for (const chart of charts) chart.read(this.own.cursor);
  }
  read(version) {
    if (this.cursor) this.cursor.location = version;
    this.spec.series.forEach((series, place) => {
      let index = series.x.length - 1;
      if (version !== null) series.x.forEach((x, other) => { if (Math.abs(x - version) < Math.abs(series.x[index] - version)) index = other; });
      this.values[place].textContent = number((series.shown ?? series.y)[index]);
    });
  }
  press(event) {
    const [start, end] = this.bounds(), step = Math.max(1, Math.round((end - start) / 60)), middle = this.own.cursor ?? Math.round((start + end) / 2);
    const move = by => { this.point((this.own.cursor ?? (by > 0 ? start - by : end - by)) + by); this.speak(); };
    const scale = by => this.zoom(Math.round(middle - (middle - start) * by), Math.round(middle + (end - middle) * by));
    const keys = { ArrowRight: () => move(step), ArrowLeft: () => move(-step), Home: () => { this.point(start); this.speak(); }, End: () => { this.point(end); this.speak(); },
      "+": () => scale(0.5), "=": () => scale(0.5), "-": () => scale(2), "0": () => this.zoom(null, null), Escape: () => this.point(null) };
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) { keys[event.key](); event.preventDefault(); }
  }
  speak() {
    at("spoken").textContent = `version ${this.own.cursor}: ` + this.spec.series.map((series, place) => `${series.label} ${this.values[place].textContent}`).join(", ");
  }
  tabulate() {
    const [start, end] = this.bounds();
    let versions = [...new Set(this.spec.series.flatMap(series => series.x))].filter(x => x >= start && x <= end).sort((a, b) => a - b);
    const every = Math.ceil(versions.length / 100);
    versions = versions.filter((_, index) => index % every === 0 || index === versions.length - 1);
    const at_ = this.spec.series.map(series => new Map(series.x.map((x, index) => [x, (series.shown ?? series.y)[index]])));
    this.table.replaceChildren(table(["version", ...this.spec.series.map(series => series.label)],
      versions.map(version => [String(version), ...at_.map(values => number(values.get(version)))]), this.spec.title + (every > 1 ? `, every ${every}th` : "")));
  }
}
function hush(plot) {
  // The plot itself has the focus, the name and the keys.
  plot.firstElementChild.setAttribute("aria-hidden", "true");
  const visit = root => { for (const element of root.querySelectorAll("*")) {
    if (element.tabIndex >= 0) element.tabIndex = -1;
    if (element.shadowRoot) visit(element.shadowRoot);
  } };
  visit(plot);
}
const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const chart = shown.get(entry.target);
    if (!chart) continue;
    chart.isVisible = entry.isIntersecting;
    if (!entry.isIntersecting) continue;
    chart.read?.(chart.own.cursor ?? null);
    if (!chart.model) chart.draw();
  }
}, { rootMargin: "200px" });
function forget(id) {
  for (const [plot, chart] of shown) if (at(id).contains(plot)) { watcher.unobserve(plot); shown.delete(plot); }
}
function showView() {
  at("from").value = view.from ?? ""; at("to").value = view.to ?? "";
  for (const chart of shown.values()) if (!chart.options.own) chart.frame();
}
function redraw() { for (const chart of shown.values()) if (chart.model) chart.draw(); }
function showCurves() {
  const [charts, others] = listCharts(summary.runs);
  const all = summary.runs.flatMap(run => Object.values(run.curves).flatMap(curve => [curve.x[0], curve.x[curve.x.length - 1]]));
  if (all.length) { at("from").placeholder = Math.min(...all); at("to").placeholder = Math.max(...all); }
  forget("curves");
  fill("charts", charts.map(chart => new Chart(chart).element));
  fill("others", others.map(chart => new Chart(chart).element));
  at("others-box").hidden = !others.length;
}
function table(heads, rows, caption, numbers = true) {
  return h("table", {}, h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, heads.map((head, place) => h("th", { scope: "col", class: numbers && place ? "number" : null }, head)))),
    h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, place) => place ?
      h("td", { class: numbers ? "number" : "value" }, cell) : h("th", { scope: "row" }, cell))))));
}

