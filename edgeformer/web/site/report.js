// The report, as edgeformer's own commands read it (`compare`, `profile REPORT.json`).

/**
 * @param {object} site site.json
 * @param {object} facts of `describeBrowser`
 * @param {object[]} rows measured
 * @param {{title: string, threads: number, stepMs: number | null, notes: string[]}} about this measurement
 */
export function buildReport(site, facts, rows, about) {
  const where = [facts.model ?? facts.system, facts.machine].filter(Boolean).join(" ") || "an unknown device";
  const named = about.title.trim();
  return {
    format_version: 1,
    device: "browser",
    device_title: named || `${facts.browser} on ${where}`,
    host: {
      ...facts,
      cpu: `${named || where}, in ${facts.browser}`,
      threads: about.threads,
      clock_step_ms: about.stepMs,
      versions: site.versions,
    },
    on_target: true,
    run: site.run,
    bundle: site.bundle,
    created: new Date().toISOString().replace("Z", "+00:00"),
    synthetic: site.synthetic,
    leaks: site.leaks,
    parameters: site.parameters,
    rows,
    // A page knows no budgets: edgeformer profile REPORT.json holds the report against one.
    verdict: { status: "unknown", checks: [] },
    notes: about.notes,
    subject: site.subject,
    measured_in: "browser",
  };
}

/** What a reader of the report must know beside its rows. */
export function notesOf(facts, changed) {
  const notes = [`measured in a browser, by the page of edgeformer: ${facts.browser}`];
  if (!facts.cross_origin_isolated) {
    notes.push("the page is not cross-origin isolated, so it has one thread and a coarse clock");
  }
  if (changed !== null) notes.push(changed);
  return notes;
}

/** Rules that were changed in the page's address, in words; null: none was. */
export function changedRules(rules, usual) {
  const names = Object.keys(usual).filter((name) => rules[name] !== usual[name] && typeof usual[name] === "number");
  if (!names.length) return null;
  const changes = names.map((name) => `${name} ${rules[name]} instead of ${usual[name]}`);
  return `measured with other stopping rules than usual: ${changes.join(", ")}`;
}
