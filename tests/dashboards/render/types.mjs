// node types.mjs BOARD.json ...: each board, and each panel's options, against the types that Grafana publishes. One line a fault.
import fs from 'node:fs';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import ts from 'typescript';

const here = path.dirname(fileURLToPath(import.meta.url));
const composable = './node_modules/@grafana/schema/dist/types/raw/composable';
const kinds = { timeseries: 'timeseries', stat: 'stat', bargauge: 'bargauge', table: 'table', text: 'text' };
// enums are strings in JSON, and everything may be left out
const helpers = `
type Plain<T> = T extends string ? (string extends T ? string : \`\${T}\`) : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Plain<U>[] : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type Partly<T> = T extends (infer U)[] ? Partly<U>[] : T extends object ? { [K in keyof T]?: Partly<T[K]> } : T;
`;
let source = `import type { Dashboard } from '@grafana/schema';\n`;
for (const kind of Object.values(kinds)) source += `import type * as P_${kind} from '${composable}/${kind}/panelcfg/x/types.gen';\n`;
source += helpers;
process.argv.slice(2).forEach((file, number) => {
  const board = JSON.parse(fs.readFileSync(file, 'utf8'));
  for (const annotation of board.annotations.list) { // the data source's own, which the types leave open (and, of target, say so)
    for (const key of ['expr', 'step', 'target', 'titleFormat', 'textFormat']) delete annotation[key];
  }
  source += `// ${path.basename(file)}\nexport const board${number}: Partly<Plain<Dashboard>> = ${JSON.stringify(board, null, 1)};\n`;
  for (const panel of board.panels.filter((each) => kinds[each.type])) {
    const name = `${number}_${panel.id}`;
    source += `export const options${name}: Partly<Plain<P_${panel.type}.Options>> = ${JSON.stringify(panel.options ?? {})};\n`;
    const custom = panel.fieldConfig?.defaults?.custom;
    if (custom) source += `export const custom${name}: Partly<Plain<P_${panel.type}.FieldConfig>> = ${JSON.stringify(custom)};\n`;
  }
});
const generated = path.join(here, `boards-${process.pid}.gen.ts`);
fs.writeFileSync(generated, source);
let faults;
try {
  const program = ts.createProgram([generated], {
    target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.ESNext, moduleResolution: ts.ModuleResolutionKind.Bundler,
    skipLibCheck: true, strict: true, noEmit: true, types: [], lib: ['lib.es2022.d.ts', 'lib.dom.d.ts'],
  });
  faults = ts.getPreEmitDiagnostics(program);
} finally {
  fs.rmSync(generated);
}
for (const fault of faults) {
  const at = fault.file?.getLineAndCharacterOfPosition(fault.start);
  const line = at && fault.file ? fault.file.text.split('\n')[at.line].trim().slice(0, 120) : '';
  console.log(`${ts.flattenDiagnosticMessageText(fault.messageText, ' ').slice(0, 300)}  [${line}]`);
}
process.exitCode = faults.length ? 1 : 0;
